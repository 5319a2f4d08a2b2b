/// \file point_to_point_post.h
/// \brief One message of this rank that is under way.
#pragma once

#include "runtime/control/message_post.h"
#include "runtime/shm/point_to_point.h"

namespace alltoallv {

/// Drives the rank's messages while its caller waits.
class PointToPoint::Pending final : public MessageWork {
  public:
    explicit Pending(std::shared_ptr<PointToPoint> owner) : owner_(std::move(owner)) {}

    bool await(double seconds) override {
        if (!done() && !owner_->drive(*this, seconds)) return false;
        return Work::await(seconds);
    }

  private:
    std::shared_ptr<PointToPoint> owner_;
};

struct PointToPoint::Post : MessagePost {
    std::shared_ptr<Pending> work;
    Clock::time_point next_look{};
    Location input{};                // of the sender
    MessageSlot* message = nullptr;  // once offered or taken
    size_t moved = 0;                // bytes moved so far, in pieces
    uint32_t pieces = 0;
    bool in_pieces = false, waits_for_pieces = false;
    TraceRecord* traced = nullptr;

    /// True if the peer has made its half.
    bool is_answered() const {
        return message != nullptr && (!sends() || message->state.load() != MessageState::offered);
    }
};

}  // namespace alltoallv
