/// \file links.h
/// \brief The sockets and pidfds to the peers of one communicator: for deaths, poison, and requests for segments.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "runtime/bootstrap/bootstrap.h"
#include "runtime/shm/peer_memory.h"

namespace alltoallv {

/// The callbacks run on the reactor's thread, or in `take`.
struct LinkEvents {
    std::function<void(int rank, const std::string& how)> lost;
    std::function<void()> poisoned;
    std::function<void()> answered;  // a segment that was requested has come, or will not
};

struct WireMessage {
    enum Kind : uint32_t { want_segment, segment_sent, released, poisoned } kind;
    uint32_t segment;

    bool operator==(const WireMessage&) const = default;
};

class Links : public std::enable_shared_from_this<Links> {
  public:
    static std::shared_ptr<Links> make(std::vector<Peer> peers, LinkEvents events);
    ~Links();

    /// From now on callbacks run. Throws if a resource for that has run out.
    void watch();

    /// After this returns, no callback runs any more and all descriptors are closed. Do not call it from a callback.
    void stop();

    /// Segments that the peer sends are kept in `memory`, which belongs to the peer's process.
    void set_memory(int rank, std::shared_ptr<PeerMemory> memory);

    /// Sends a segment of this process's arena that the peer will need, unless it has been sent to that process before;
    /// only if the socket takes it now, since the peer can request it.
    void give_segment(int rank, uint32_t segment);

    /// Takes what the peer has sent, without waiting for the reactor's thread.
    void take(int rank);

    /// Requests a segment of the arena of `rank`; the answer goes to its PeerMemory. Does nothing while one is awaited.
    void request_segment(int rank, uint32_t segment);

    /// Returns how many segments have been requested.
    uint64_t requests() const { return requests_.load(std::memory_order_relaxed); }

    /// Makes every peer's process check for poison, even if none of its threads waits.
    void announce_poison();

    /// Informs the processes of all peers, over all links of this process, that its arena no longer has these segments.
    static void announce_released(std::span<const uint32_t> segments);

    /// True once the process of `rank` is known to have ended.
    bool gone(int rank) const { return links_[static_cast<size_t>(rank)]->gone.load(std::memory_order_acquire); }

    /// Returns a descriptor that shows if the process of `rank` lives, even after `stop`.
    UniqueFd duplicate_pidfd(int rank) const;

  private:
    struct Link {
        Peer peer;
        std::atomic<bool> gone{false};
        std::shared_ptr<PeerMemory> memory;
        std::set<uint32_t> requested;    // segments that the peer has not answered for
        std::deque<WireMessage> unsent;  // that the socket has not taken, in order, each once
    };

    explicit Links(std::vector<Peer> peers, LinkEvents events);
    void tell_all(const WireMessage& message);
    void send(Link& link, const WireMessage& message);
    void send_unsent(Link& link);
    void on_socket(int rank);
    bool receive_all(int rank);
    enum class Event { none, answered, poisoned, invalid };
    Event on_message(int rank, struct Message& message);
    Event on_cut_short(Link& link, const struct Message& message, const Error& error);
    void on_death(int rank, const std::string& how);
    void unwatch(int rank);
    friend struct LinksRegistry;

    std::mutex events_mutex_;  // held while an event is delivered; `stop` empties them
    LinkEvents events_;
    std::vector<std::unique_ptr<Link>> links_;
    mutable std::mutex mutex_;  // guards all links; taken after the one above
    bool stopped_ = false;
    std::atomic<uint64_t> requests_{0};
};

}  // namespace alltoallv
