/// \file tcp_leaders.h
/// \brief Keeps the hosts' control segments equal: rows, failures, departures and waits travel between their leaders.
///
/// The ranks of a host share a segment. The lowest of them is the leader: its process agrees with the leaders that it
/// has a connection to (tree_agreement.h), writes what it receives into the segment, and forwards the rest to the
/// others of these leaders. With a summary go the rows that bring data, counts that ranks learn, or failures to those
/// behind the receiver; all rows are sent only if the summaries do not agree. Other ranks ring their leader when there
/// is something to send.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/bootstrap/bootstrap.h"
#include "runtime/control/control.h"
#include "runtime/hosts/tcp_join.h"
#include "runtime/hosts/tcp_tree.h"
#include "runtime/hosts/tree_agreement.h"

namespace alltoallv {

class TcpLeaders : public std::enable_shared_from_this<TcpLeaders> {
  public:
    /// `here` are the ranks of this host, in order, and `local` are the connections to them. `control` must outlive the
    /// leaders, or their `stop`.
    TcpLeaders(TcpMembership membership, std::vector<int> here, std::vector<Peer> local, ControlPlane& control);
    ~TcpLeaders();

    /// Sets the functions of the control plane, and starts to listen to the peers.
    void watch();

    /// Informs the peers that this rank leaves; a leader waits up to a second until the others know. After this
    /// returns, nothing uses the control plane. Do not call it from a callback.
    void stop();

    /// Bytes that go to a neighbour: a summary without rows, and absent ranks.
    static const size_t bytes_of_sum;
    static size_t bytes_of_absent(size_t ranks) { return sizeof(Message) + ranks * sizeof(int32_t); }

  private:
    /// A connection between leaders.
    struct Connection {
        UniqueFd socket;
        int leader = 0;
        std::vector<int> ranks;  // ranks whose messages come over it, in order
        std::string rx_buffer;   // the beginning of a message
        std::string rx_backlog;  // what follows it and came while this side was sending
        bool is_parent = false;  // it leads to rank 0
        bool ended = false;      // the other end has closed
        int64_t peer_clock = 0;  // the other clock as last received, and when
        int64_t received_at_ns = 0;
        int64_t pinged_at_ns = 0;  // when it was last asked for an answer
        bool responsive = true;    // false from then until anything comes
    };
    enum class MessageKind : uint32_t {
        rows = 1,
        difference,
        poisoned,
        departed,
        waits,
        ping,
        pong,
        silent,
        sum,
        absent
    };
    struct Message {
        uint32_t bytes = 0;  // bytes that follow
        MessageKind kind = MessageKind::departed;
        int32_t rank = 0;  // the rank it is about
        PoisonKind poison = PoisonKind::none;
        // Of an operator; for a poison: the lost rank + 1; for silence: 1 or 0; for a
        // departure: twice the last operator of the rank, and 1 more if the process ends.
        uint64_t seq = 0;
    };

    class Lock;

    bool leads() const { return here_[0] == control_.rank(); }
    static bool comes_over(const Connection& connection, int64_t rank) {
        return std::binary_search(connection.ranks.begin(), connection.ranks.end(), rank);
    }
    bool is_here(int rank) const { return tree_.host_of(rank) == tree_.host_of(here_[0]); }
    int cut_off(int rank) const;
    int hidden_by(int rank) const;
    bool all_ended();
    static void ignore(const Peer& peer);

    std::vector<Connection> connect(TcpMembership& membership) const;
    TreeAgreement make_agreement();
    void published(uint64_t seq);
    void note_wait();
    void send_news();
    void send_departures();
    void send_poison();
    void ping();
    void note_silence(const Connection& connection, bool silent);
    void send_to_others(size_t except, const Message& message, const std::string& body);
    void send(Connection& connection, Message message, const std::string& body);
    bool send_or_receive(Connection& connection, const std::string& data);

    void on_local(size_t index, bool ended, const std::string& how);
    void on_bytes(size_t connection);
    bool receive(Connection& connection, std::string& into);
    void read_messages(size_t connection);
    void on_message(size_t connection, const Message& message, const char* body);
    void on_end(Connection& connection);
    Row& row(int rank, uint64_t seq) const { return control_.row(rank, seq); }
    friend struct TcpLeadersOfProcess;

    // tcp_leader_messages.cpp
    bool has_all_here(uint64_t seq) const;
    void send_sums();
    void send_sum(size_t connection, uint64_t seq, const Summary& sum);
    void receive_sum(size_t connection, const Message& message, const char* body);
    void receive_absent(size_t connection, const Message& message, const char* body);
    void send_rows(const std::vector<int>& ranks, uint64_t seq, size_t except);
    bool brings(int rank, uint64_t seq, const Connection& to) const;
    void append_row(std::string& body, int rank, uint64_t seq, const Connection& to, bool whole) const;
    int take_row(const char*& body, const char* end, uint64_t seq, const Connection& from);
    void receive_rows(size_t connection, const Message& message, const char* body);
    void send_waits();
    void receive_waits(size_t connection, const Message& message, const char* body);
    size_t most_bytes() const;
    static Error invalid_message();

    static constexpr size_t nobody = SIZE_MAX;

    ControlPlane& control_;
    const TcpTree tree_;
    std::vector<int> here_;                // in order: the first is the leader
    std::vector<Peer> local_;              // as `here_`
    std::recursive_mutex mutex_;           // guards the members below; a failed send may lead to another
    std::vector<Connection> connections_;  // of a leader
    TreeAgreement agreement_;              // of a leader
    uint64_t waited_for_ = 0;              // the operator in which ranks of this host wait, and since when
    int64_t waited_since_ns_ = 0;
    std::vector<uint64_t> waits_sent_;  // by rank: the version of the board
    std::vector<bool> departures_sent_;
    bool poison_sent_ = false, stopped_ = false;
    int lock_depth_ = 0;  // of this thread, one in another
};

inline constexpr size_t TcpLeaders::bytes_of_sum = sizeof(Message) + sizeof(Summary);

}  // namespace alltoallv
