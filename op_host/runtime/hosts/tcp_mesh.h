/// \file tcp_mesh.h
/// \brief The TCP connections between every two ranks on different hosts, for the data.
#pragma once

#include <string>
#include <vector>

#include "runtime/base/unique_fd.h"
#include "runtime/core/mover.h"

namespace alltoallv {

class TcpMesh final : public Mover {
  public:
    /// `sockets`: non-blocking, by rank; empty where this mover has no connection.
    explicit TcpMesh(std::vector<UniqueFd> sockets);

    std::string name() const override { return "tcp"; }
    void begin(std::span<const Outgoing> out, std::span<const Incoming> in) override;
    bool progress() override;
    std::vector<int> missing() const override;
    void close() override;

  private:
    struct Connection {
        UniqueFd socket;
        Outgoing out{};
        Incoming in{};

        bool busy() const { return out.bytes > 0 || in.bytes > 0; }
    };

    void pump(int rank, Connection& connection);

    std::vector<Connection> connections_;  // by rank; without a socket where there is none
    size_t pending_ = 0;                   // busy connections
};

}  // namespace alltoallv
