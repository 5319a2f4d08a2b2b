/// \file tcp_messages.h
/// \brief Messages between two ranks of a communicator between hosts, over connections of their own.
///
/// A sender offers a message: tag, dtype, count, and the data if they are small. The receiver takes the first that fits
/// one of its receives, in the order of both, or refuses it; its answer ends the send. Large data of a rank on the same
/// host come through shared memory once they are taken. From the rank's first message on, or the first long wait of its
/// process, one thread serves all connections.
#pragma once

#include <atomic>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/base/unique_fd.h"
#include "runtime/control/control.h"
#include "runtime/core/communicator.h"

namespace alltoallv {

class TcpMessages : public std::enable_shared_from_this<TcpMessages> {
  public:
    /// `sockets`: by rank, non-blocking, empty for this one. `within`: of the ranks `on_host`, which share memory, or
    /// null. `key` stands for the communicator; see core/active_call.h. The control plane must outlive this, or its
    /// `close`.
    TcpMessages(ControlPlane& control, std::vector<UniqueFd> sockets, CommunicatorPtr within, std::vector<int> on_host,
                const void* key);
    ~TcpMessages();

    MessageWorkPtr start(const PeerMessage& message, double timeout);

    /// Starts the thread that serves all connections of the rank.
    void serve();

    /// Ends pending messages with an error, and the thread.
    void close();

  private:
    class Pending;
    struct Frame;
    struct Post;
    struct Offer;
    struct Connection;

    void run();
    void wait_a_step();
    void look();
    void tell_to_wait();
    void tell_wait(const MessageWork& work, Deadlocks::Wait& wait);
    bool shares_memory(const Post& post, int peer) const;
    void carry(Post& post, int peer);
    void drive_carried();
    void land(Post& post);
    void say_last_words();
    void offer(Post& post);
    void match();
    bool meet(Post& post, int from);
    void take(Post& post, Offer& offer);
    void refuse(Post& post, const Offer& offer);
    void hear(int peer);
    void on_frame(int peer, const Frame& frame, std::string body);
    void speak(int peer);
    void say(int peer, const Frame& frame, const char* body = nullptr, size_t bytes = 0);
    void finish(Post& post, const std::optional<Error>& error = {});
    Post* find(bool sends, int peer, uint64_t number);

    ControlPlane& control_;
    CommunicatorPtr within_;    // for large data of the ranks on this host; null if there are none
    std::vector<int> on_host_;  // their ranks here, by their ranks there
    const void* key_;
    std::mutex mutex_;  // guards the members below
    std::vector<Connection> connections_;
    std::list<Post> posts_;    // in the order of their calls
    UniqueFd bell_;            // an eventfd: there is something to send, or to end
    std::mutex thread_mutex_;  // guards the next member
    std::thread thread_;
    std::atomic<bool> closing_{false};  // changes while both mutexes are locked
};

}  // namespace alltoallv
