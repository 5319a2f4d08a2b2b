// Waits for a peer's call, among which deadlocks are found: an offer on its way is none, so its receiver says that it
// came.
#include <algorithm>

#include "runtime/hosts/tcp_messages_parts.h"

namespace alltoallv {
namespace {

constexpr double tells_after = 0.1;   // seconds in which an offer is not taken, before its sender is told
constexpr double tells_every = 0.02;  // seconds

}  // namespace

bool TcpMessages::Pending::await(double seconds) {
    if (seconds >= 0) return Work::await(seconds);
    const ActiveCall here(owner_->key_);
    Deadlocks::Wait wait(owner_->control_);
    while (!Work::await(tells_every)) owner_->tell_wait(*this, wait);
    return true;
}

/// Tells the senders of offers that wait for a call of this rank.
void TcpMessages::tell_to_wait() {
    for (size_t j = 0; j < connections_.size(); ++j)
        for (Offer& offer : connections_[j].offers) {
            if (offer.notified || seconds_since(offer.came) < tells_after) continue;
            offer.notified = true;
            if (static_cast<int>(j) != control_.rank())
                say(static_cast<int>(j), {Say::wait, offer.frame.tag, offer.frame.number});
        }
}

/// Publishes the caller's wait while the message needs a call of its peer, which has nothing of it under way.
void TcpMessages::tell_wait(const MessageWork& work, Deadlocks::Wait& wait) {
    const std::lock_guard lock(mutex_);
    const auto post =
        std::ranges::find(posts_, &work, [](const Post& each) -> const MessageWork* { return each.work.get(); });
    if (closing_ || post == posts_.end() || work.done() || post->other() < 0 || post->other() == control_.rank() ||
        (post->sends() ? !post->waits : post->met))
        wait.ends();
    else
        wait.note_blocked(post->asked.op, {post->other()}, post->timeout, Clock::now(), post->started);
}

}  // namespace alltoallv
