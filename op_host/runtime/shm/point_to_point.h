/// \file point_to_point.h
/// \brief Messages between two ranks over the channels of the control segment, independent of collectives.
///
/// A sender offers a message in its channel to the receiver: dtype, count, tag, and the location of the data. The
/// receiver takes the first that fits one of its receives, in the order of both, compares, and reads the data: from the
/// arena, from private memory with process_vm_readv, or in pieces through the channel. Its answer ends the send. No
/// message uses a sequence number or waits for a collective. A thread that waits for a message moves all of this rank's
/// messages; if none waits, a separate thread does.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/control/control.h"
#include "runtime/core/communicator.h"
#include "runtime/shm/links.h"
#include "runtime/shm/peer_memory.h"

namespace alltoallv {

class PointToPoint : public std::enable_shared_from_this<PointToPoint> {
  public:
    /// The paths between sender and receiver, as both know them.
    struct Ways {
        bool pull, cma;
    };

    /// `key` stands for the communicator; see core/active_call.h.
    PointToPoint(ControlPlane& control, std::shared_ptr<Links> links, std::vector<ShmPeer> peers, Ways ways,
                 const void* key);
    ~PointToPoint();

    /// Starts a message as far as possible without waiting; `waits` says that the caller will drive it.
    MessageWorkPtr start(const PeerMessage& message, double timeout, bool waits);

    /// Ends pending messages with an error, and all use of the control segment.
    void close();

  private:
    class Pending;
    struct Post;

    bool drive(Work& work, double seconds);
    bool progress();
    bool advance(Post& post);
    bool offer(Post& post);
    bool push(Post& post);
    bool take(Post& post);
    bool take_from(Post& post, int from);
    bool read(Post& post);
    bool read_itself(Post& post);
    bool read_pieces(Post& post);
    bool begin_pieces(Post& post);
    void look(Post& post);
    bool finish(Post& post, std::exception_ptr error = nullptr);
    void end(Post& post, const Error& error);
    void tell_wait(const Work& work, Deadlocks::Wait& wait, Clock::time_point now);
    void run();
    template <class Condition>
    void await(Condition&& condition, uint64_t& rounds);

    bool staged(Location input) const { return input.segment() != 0 ? !ways_.pull : !ways_.cma || refused_; }
    const char* address_of(const Post& post);
    Channel& channel(int from, int to) const { return control_.layout().channel(base_, from, to); }
    MessageSlot& slot(int from, int to, uint64_t number) const {
        return channel(from, to).messages[number % Channel::slots];
    }
    void ring(int rank) { Doorbell(control_.flags(rank).messages).ring(); }
    Error mismatch(const Post& post, const MessageSlot& message) const;

    ControlPlane& control_;
    char* base_;
    std::shared_ptr<Links> links_;
    std::vector<ShmPeer> peers_;
    Ways ways_;
    const void* key_;
    bool refused_ = false;  // the kernel no longer lets this rank read its peers' private memory

    std::mutex mutex_;                      // guards the members below
    std::list<Post> posts_;                 // in the order of their calls
    std::vector<uint64_t> sent_, arrived_;  // per peer: messages so far
    uint64_t pass_ = 0;  // number of times that all messages have been looked at; in each, receives see the same offers
    std::vector<uint64_t> heard_;    // per peer: the pass in which its offers were last read
    std::vector<uint64_t> reading_;  // per peer: the pass until which pieces are read, `in_progress` if they are
    std::vector<std::deque<uint64_t>> waiting_;  // per peer: numbers of messages that have not been taken
    std::condition_variable changed_;            // posts_, drivers_ or closing_ has changed
    std::thread thread_;
    int drivers_ = 0;
    bool closing_ = false;
};

}  // namespace alltoallv
