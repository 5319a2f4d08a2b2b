// Large messages between ranks of one host, which go through shared memory.
#include <algorithm>

#include "runtime/hosts/tcp_messages_parts.h"

namespace alltoallv {
namespace {

constexpr double step_seconds = 0.0005;

}  // namespace

/// After a loss `within_` has ended, so that messages which survive it go over the connections.
bool TcpMessages::shares_memory(const Post& post, int peer) const {
    return peer != control_.rank() && !post.survives() &&
           std::find(on_host_.begin(), on_host_.end(), peer) != on_host_.end();
}

/// Starts to move a message's data. Both sides do so in the order in which the receiver takes their messages.
void TcpMessages::carry(Post& post, int peer) {
    PeerMessage data = post.asked;
    data.peer = static_cast<int>(std::find(on_host_.begin(), on_host_.end(), peer) - on_host_.begin());
    data.tag = 0;
    data.at_most = false;
    try {
        post.carried = within_->post(data, post.timeout, true);
    } catch (const Error& error) {
        control_.poison_with(error, post.text(control_));
    }
}

void TcpMessages::drive_carried() {
    std::vector<MessageWorkPtr> under_way;
    {
        const std::lock_guard lock(mutex_);
        for (const Post& post : posts_)
            if (post.carried && !post.carried->done()) under_way.push_back(post.carried);
    }
    try {
        if (!under_way.empty()) (void)under_way.front()->wait(step_seconds);  // which moves all of them
    } catch (const Error&) {
        // `land` sees it
    }
    const std::lock_guard lock(mutex_);
    for (Post& post : posts_)
        if (post.carried && post.carried->done() && !post.work->done()) land(post);
}

void TcpMessages::land(Post& post) {
    const std::exception_ptr failure = post.carried->error();
    if (failure == nullptr) return finish(post);
    try {
        std::rethrow_exception(failure);
    } catch (const Error& error) {
        if (!control_.poisoned()) control_.poison_with(error, post.text(control_));
    }
    finish(post, post.ended(control_));
}

}  // namespace alltoallv
