/// \file message_post.h
/// \brief What all transports keep of a message of this rank that is under way.
#pragma once

#include <string>
#include <utility>

#include "runtime/control/control.h"
#include "runtime/core/message_text.h"

namespace alltoallv {

/// The error of a message that comes during `destroy()`, when the control plane may be gone.
inline Error was_destroyed(OpKind op) {
    return peer_lost(4017, std::string(name_of(op)) + ": the communicator was destroyed meanwhile");
}

/// One send or receive of this rank.
struct MessagePost {
    PeerMessage asked;
    double timeout;
    Clock::time_point started = Clock::now();
    int from = PeerMessage::any_rank;  // once matched

    bool sends() const { return asked.op == OpKind::send; }
    char* data() const { return static_cast<char*>(asked.data); }
    size_t bytes() const { return asked.count < 0 ? 0 : static_cast<size_t>(asked.count) * size_of(asked.dtype); }
    /// Makes a recv one of as many elements as have been sent.
    void expect(int64_t count, MessageWork& work) {
        const bool any = std::exchange(asked.count, count) < 0;
        if (any) asked.data = work.make_memory(bytes());
    }
    /// Returns the rank that it waits for; negative if any rank may send.
    int other() const { return from >= 0 ? from : asked.peer; }

    std::string text(const ControlPlane& control) const {
        return describe(asked, other() < 0 ? other() : control.reported_rank(other()), control.domain());
    }

    /// Returns the error of a message that can no longer be completed.
    Error ended(const ControlPlane& control) const {
        if (control.poisoned()) return control.poison_error(text(control));
        return peer_lost(4018, text(control) + ": the communicator was destroyed while the message was pending");
    }
};

}  // namespace alltoallv
