#include "runtime/shm/point_to_point.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "runtime/base/quiet_thread.h"
#include "runtime/core/hooks.h"
#include "runtime/shm/arena.h"
#include "runtime/shm/point_to_point_post.h"

namespace alltoallv {
namespace {

constexpr uint64_t spins = 100, yields = 400;  // before a wait sleeps
constexpr int sleep_ms = 20;
constexpr auto look_every = std::chrono::milliseconds(20);

}  // namespace

PointToPoint::PointToPoint(ControlPlane& control, std::shared_ptr<Links> links, std::vector<ShmPeer> peers, Ways ways,
                           const void* key)
    : control_(control),
      base_(control.memory()->data()),
      links_(std::move(links)),
      peers_(std::move(peers)),
      ways_(ways),
      key_(key),
      sent_(peers_.size()),
      arrived_(peers_.size()),
      heard_(peers_.size()),
      reading_(peers_.size()),
      waiting_(peers_.size()) {}

PointToPoint::~PointToPoint() = default;

MessageWorkPtr PointToPoint::start(const PeerMessage& message, double timeout, bool waits) {
    const auto work = std::make_shared<Pending>(shared_from_this());
    Post post{{message, timeout < 0 ? control_.timeout() : timeout}, work};
    post.next_look = post.started + look_every;
    if (post.sends()) post.input = Arena::instance().locate(message.data, post.bytes());
    const std::lock_guard lock(mutex_);
    if (closing_) throw was_destroyed(message.op);
    if (control_.poisoned()) throw post.ended(control_);
    if (!waits && !thread_.joinable()) {
        try {
            thread_ = quiet_thread("alltoallv-p2p", "messages", [this] { run(); });
        } catch (const Error& error) {  // its peer waits for this message already, or will
            control_.poison_with(error, post.text(control_));
            throw;
        }
    }
    if (message.looks == PeerMessage::Looks::no)
        post.traced = control_.tracer().begin(0, message.op, message.dtype, post.started, message.peer);
    posts_.push_back(std::move(post));
    control_.messages_under_way.fetch_add(1);
    progress();
    if (!waits && !work->done()) changed_.notify_all();
    return work;
}

void PointToPoint::close() {
    std::unique_lock lock(mutex_);
    closing_ = true;
    for (Post& post : posts_) end(post, post.ended(control_));
    posts_.clear();
    changed_.notify_all();
    ring(control_.rank());
    changed_.wait(lock, [&] { return drivers_ == 0; });
    lock.unlock();
    if (thread_.joinable()) thread_.join();
    for (ShmPeer& peer : peers_) peer.segments = {};
}

/// Makes one step of a wait for `condition`: calls it, spins or yields, and later sleeps until a peer rings.
template <class Condition>
void PointToPoint::await(Condition&& condition, uint64_t& rounds) {
    if (++rounds > spins + yields) {
        Doorbell(control_.my_flags().messages).sleep(condition, sleep_ms);
    } else if (condition()) {
        rounds = 0;
    } else if (rounds <= spins && control_.has_room()) {
        cpu_pause();
    } else {
        sched_yield();
    }
}

/// The caller's thread moves all messages until `work` is done. Returns false if that takes longer than `seconds`.
bool PointToPoint::drive(Work& work, double seconds) {
    const auto begun = Clock::now();
    std::unique_lock lock(mutex_);
    if (closing_) return true;
    const ActiveCall here(key_);
    ++drivers_;
    const auto leave = [&] {
        --drivers_;
        changed_.notify_all();
    };
    uint64_t rounds = 0;
    auto next_poll = begun + look_every;
    Deadlocks::Wait reported_wait(control_);
    try {
        while (!work.done() && !closing_) {
            const auto now = Clock::now();
            if (seconds >= 0 && seconds_since(begun) >= seconds) break;
            lock.unlock();
            if (now >= next_poll) {
                next_poll = now + look_every;
                if (seconds < 0) tell_wait(work, reported_wait, now);
                if (hooks().poll) hooks().poll();
            }
            await(
                [&] {
                    const std::lock_guard inner(mutex_);
                    return closing_ || progress() || work.done();
                },
                rounds);
            lock.lock();
        }
    } catch (...) {
        lock.lock();
        control_.poison(PoisonKind::aborted, "rank " + std::to_string(control_.reported_rank(control_.rank())) +
                                                 " was interrupted while it waited for a message");
        progress();
        leave();
        throw;
    }
    leave();
    return work.done();
}

/// Publishes the wait while the message needs a call of its peer.
void PointToPoint::tell_wait(const Work& work, Deadlocks::Wait& reported_wait, Clock::time_point now) {
    const std::lock_guard lock(mutex_);
    progress();
    const auto post = std::ranges::find(posts_, &work, [](const Post& each) -> const Work* { return each.work.get(); });
    if (post == posts_.end() || post->is_answered() || post->other() < 0 || post->other() == control_.rank())
        reported_wait.ends();
    else
        reported_wait.note_blocked(post->asked.op, {post->other()}, post->timeout, now);
}

void PointToPoint::run() {
    std::unique_lock lock(mutex_);
    for (uint64_t rounds = spins;; rounds = spins) {
        changed_.wait(lock, [&] { return closing_ || (!posts_.empty() && drivers_ == 0); });
        while (!closing_ && !posts_.empty() && drivers_ == 0) {
            lock.unlock();
            await(
                [&] {
                    const std::lock_guard inner(mutex_);
                    return closing_ || drivers_ > 0 || progress();
                },
                rounds);
            lock.lock();
        }
        if (closing_) return;
    }
}

/// Moves the data that can be moved now. Returns true if anything has changed.
bool PointToPoint::progress() {
    ++pass_;
    bool changed = false;
    for (auto next = posts_.begin(); next != posts_.end();) {
        const auto post = next++;
        changed |= advance(*post);
        if (post->work->done()) posts_.erase(post);
    }
    return changed;
}

bool PointToPoint::advance(Post& post) {
    try {
        if (!control_.poisoned()) {
            const bool begun = post.message != nullptr;
            if (post.sends() ? (begun ? push(post) : offer(post)) : (begun ? read(post) : take(post))) return true;
            look(post);
        }
    } catch (const Error& error) {  // the peer is in the middle of it and cannot continue without this rank
        control_.poison_with(error, post.text(control_));
    }
    if (!control_.poisoned()) return false;
    end(post, post.ended(control_));
    return true;
}

/// Checks now and then if the peer still lives, and if the time is over.
void PointToPoint::look(Post& post) {
    const auto now = Clock::now();
    if (now < post.next_look) return;
    post.next_look = now + look_every;
    const std::vector<int> late = control_.peers_of(post.other());
    const bool left =
        !late.empty() && std::all_of(late.begin(), late.end(), [&](int j) { return control_.has_left(j); });
    if (left) {
        // Its answer counts if it came before it left.
        if (post.sends() && post.message != nullptr && push(post)) return;
        return control_.left_early(late[0]);
    }
    if (seconds_since(post.started) < post.timeout) return;
    control_.poison(PoisonKind::timeout, control_.describe_wait("waited", post.started, post.text(control_), late) +
                                             "; the timeout is over");
}

bool PointToPoint::finish(Post& post, std::exception_ptr error) {
    if (post.traced != nullptr) {
        if (post.sends()) post.traced->counts()[post.asked.peer] = post.asked.count;
        control_.tracer().end(*std::exchange(post.traced, nullptr), control_.trace_state(error == nullptr),
                              post.sends() ? 0 : post.bytes(), flight_ns());
    }
    control_.messages_under_way.fetch_sub(1);
    post.work->finish(std::move(error));
    return true;
}

/// Ends a message with an error, and makes sure that no peer still reads here, which would crash within a process.
void PointToPoint::end(Post& post, const Error& error) {
    if (post.work->done()) return;
    // This rank no longer reads: for none of its messages once the communicator has ended, lest it wait below for a
    // peer that waits for it.
    for (Post& each : posts_) {
        if (each.sends() || each.message == nullptr || (&each != &post && !control_.poisoned())) continue;
        MessageState state = MessageState::taken;
        each.message->state.compare_exchange_strong(state, MessageState::withdrawn, std::memory_order_acq_rel);
    }
    if (post.sends() && post.message != nullptr) {
        MessageState state = MessageState::offered;
        post.message->state.compare_exchange_strong(state, MessageState::withdrawn, std::memory_order_acq_rel);
        const auto until = Clock::now() + thread_patience;
        while (peers_[static_cast<size_t>(post.asked.peer)].same_process && state == MessageState::taken &&
               Clock::now() < until) {
            sched_yield();
            state = post.message->state.load(std::memory_order_acquire);
        }
    }
    finish(post, std::make_exception_ptr(error));
}

Error PointToPoint::mismatch(const Post& post, const MessageSlot& message) const {
    const int me = control_.reported_rank(control_.rank()), peer = control_.reported_rank(post.other());
    return message_mismatch(message.tag, control_.domain(), post.sends() ? me : peer, {message.count, message.dtype},
                            post.sends() ? peer : me, {message.expected_count, message.expected_dtype});
}

}  // namespace alltoallv
