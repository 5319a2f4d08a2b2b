/// \file tcp_mesh.h
/// \brief A TCP connection between every two ranks on different hosts, for the data.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "core/mover.h"

namespace alltoallv {

struct TcpMeshOptions {
    int rank = 0;
    std::vector<int> peers;      ///< ranks on other hosts
    double timeout = 600.0;      ///< seconds
    std::function<void()> poll;  ///< called about every 20 ms; may throw
    /// Hands everybody what all ranks give, texts of up to `TcpMesh::card_bytes`. Collective.
    std::function<std::vector<std::string>(const std::string&)> gather;
};

class TcpMesh final : public Mover {
  public:
    static constexpr size_t card_bytes = 2048;

    /// Collective over the ranks of `gather`, which must be known to each other: rank 0 makes up the secret by which
    /// ranks that connect prove that they belong.
    explicit TcpMesh(const TcpMeshOptions& options);

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

    void connect_all(const TcpMeshOptions& options, const std::vector<std::string>& cards, const std::string& secret,
                     const UniqueFd& listener);
    void pump(int rank, Connection& connection);

    std::vector<Connection> connections_;  // by rank; without a socket where there is none
    size_t pending_ = 0;                   // connections that are busy
};

/// "port secret address address ...", as many addresses as fit into `bytes`, filled up with zeros.
std::string card_of(int port, const std::string& secret, size_t bytes);

std::vector<std::string> words_of(const std::string& card);

/// Nobody can guess it.
std::string random_secret();

}  // namespace alltoallv
