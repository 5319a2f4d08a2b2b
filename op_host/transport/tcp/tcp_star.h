/// \file tcp_star.h
/// \brief Keeps one control segment per rank alike: rows, failures and departures travel over rank 0.
///
/// Every rank has a segment of its own, as `ControlPlane` knows it from shared memory. Rank 0 gets the rows whole and
/// hands each rank the part that concerns it, so that an operator costs a rank O(W) bytes. When counts do not balance,
/// rank 0 adds the first pair that differs, and all ranks come to one verdict.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "control/control.h"
#include "transport/tcp/tcp_meeting.h"

namespace alltoallv {

class TcpStar : public std::enable_shared_from_this<TcpStar> {
  public:
    /// `control` outlives the star, or its `stop`.
    static std::shared_ptr<TcpStar> make(std::vector<UniqueFd> sockets, ControlPlane& control);
    ~TcpStar();

    /// Begins to listen to the peers, once the control plane's functions are in place.
    void watch();

    /// The control plane's on_publish and on_poison.
    void publish(Row& row, uint64_t seq);
    void tell_poison();

    /// Tells the peers that this rank leaves, waits up to a second until they know, and closes. After return nothing
    /// touches the control plane. Not from a callback.
    void stop();

  private:
    struct Connection {
        UniqueFd socket;
        std::string heard;   // the beginning of a message
        bool ended = false;  // the other end has closed
    };
    struct Message;

    TcpStar(std::vector<UniqueFd> sockets, ControlPlane& control);
    bool is_root() const { return control_.rank() == 0; }
    int rank_of(size_t connection) const { return is_root() ? static_cast<int>(connection) : 0; }
    size_t most_bytes() const;
    bool all_ended();
    void on_bytes(size_t connection);
    void on_message(size_t connection, const Message& message, const char* body);
    void on_end(size_t connection);
    void hear_row(const Message& message, const char* body);
    void relay(Row& row, int rank, uint64_t seq);
    PairDifference find_difference(int newest, uint64_t seq) const;
    void send(size_t connection, Message message, const std::string& body);
    Row& row(int rank, uint64_t seq) const { return control_.layout().row(base_, rank, seq); }
    friend struct TcpStars;

    ControlPlane& control_;
    char* base_;
    std::recursive_mutex mutex_;           // guards the wires; a failed send may lead to another
    std::vector<Connection> connections_;  // as in TcpMembership
    bool stopped_ = false;
};

}  // namespace alltoallv
