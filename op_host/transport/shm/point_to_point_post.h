/// \file point_to_point_post.h
/// \brief One message of this rank that is under way.
#pragma once

#include "transport/shm/point_to_point.h"

namespace alltoallv {

/// Drives the rank's messages while its caller waits.
class PointToPoint::Pending final : public MessageWork {
  public:
    explicit Pending(std::shared_ptr<PointToPoint> owner) : owner_(std::move(owner)) {}

    bool wait(double seconds) override {
        if (!done() && !owner_->drive(*this, seconds)) return false;
        return Work::wait(seconds);
    }

  private:
    std::shared_ptr<PointToPoint> owner_;
};

/// One send or receive of this rank.
struct PointToPoint::Post {
    PeerMessage asked;
    double timeout;
    std::shared_ptr<Pending> work;
    Clock::time_point started, next_look;
    Location input{};                // of the sender
    MessageSlot* message = nullptr;  // once offered or taken
    int from = PeerMessage::any_rank;
    size_t moved = 0;  // bytes moved so far, in pieces
    uint32_t pieces = 0;
    bool in_pieces = false;
    TraceRecord* traced = nullptr;

    bool sends() const { return asked.op == OpKind::send; }
    char* data() const { return static_cast<char*>(asked.data); }
    size_t bytes() const { return static_cast<size_t>(asked.count) * size_of(asked.dtype); }
    /// True if the peer has made its half.
    bool is_answered() const {
        return message != nullptr && (!sends() || message->state.load() != MessageState::offered);
    }
    /// Returns the rank that it waits for; negative if any rank may send.
    int other() const { return from >= 0 ? from : asked.peer; }
};

}  // namespace alltoallv
