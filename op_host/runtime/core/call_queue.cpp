#include "runtime/core/call_queue.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "runtime/base/error.h"
#include "runtime/base/processors.h"
#include "runtime/base/quiet_thread.h"
#include "runtime/core/held_lock.h"
#include "runtime/core/hooks.h"

namespace alltoallv {
namespace {

constexpr auto slice = std::chrono::milliseconds(100);
constexpr auto pace = std::chrono::microseconds(100);  // between looks of the queue thread while calls come closely
constexpr auto linger = std::chrono::milliseconds(2);  // after the last call

}  // namespace

bool Work::wait(double seconds) {
    if (generation_ != fork_generation())
        throw backend_unavailable(
            5007, "the call was made before fork and belongs to the parent process; make a new one in the child");
    return await(std::min(seconds, 1e8));  // years
}

bool Work::await(double seconds) {
    const auto start = Clock::now();
    std::optional<BlockedThread> blocked;
    if (seconds < 0 && !done()) blocked.emplace();
    std::unique_lock lock(mutex_);
    while (!done_.load(std::memory_order_acquire)) {
        if (blocked) blocked->note_blocked(Clock::now());
        auto limit = std::chrono::duration_cast<Clock::duration>(slice);
        if (seconds >= 0) {
            const auto left = std::chrono::duration<double>(seconds) - (Clock::now() - start);
            if (left.count() <= 0) return false;
            limit = std::min(limit, std::chrono::duration_cast<Clock::duration>(left));
        }
        finished_.wait_for(lock, limit);
        if (done() || !hooks().poll) continue;
        lock.unlock();
        hooks().poll();
        lock.lock();
    }
    if (error_) std::rethrow_exception(error_);
    return true;
}

void Work::finish(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
    finished_.notify_all();
}

/// A call in a queue. A thread that waits for it without a limit helps to run calls.
class CallQueue::Queued final : public Work {
  public:
    explicit Queued(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {}

    bool await(double seconds) override {
        std::optional<ActiveCall> here;
        if (!done()) {
            std::unique_lock lock(gate_->mutex);
            if (gate_->queue != nullptr) gate_->queue->check_outside();
            here.emplace(gate_.get());
            if (gate_->queue != nullptr && seconds < 0) gate_->queue->help(*this, lock);
            if (gate_->queue != nullptr && !done()) gate_->queue->hurry();
        }
        return Work::await(seconds);
    }

  private:
    std::shared_ptr<Gate> gate_;
};

CallQueue::CallQueue(Waiters waiters, std::string name)
    : waiters_(waiters), name_(std::move(name)), gate_(std::make_shared<Gate>()), mutex_(gate_->mutex) {
    gate_->queue = this;
}

CallQueue::~CallQueue() {
    std::unique_lock lock(mutex_);
    closing_ = true;
    items_.notify_all();
    lock.unlock();
    if (thread_.joinable()) thread_.join();
    lock.lock();
    turn_.wait(lock, [&] { return helpers_ == 0; });
    gate_->queue = nullptr;
}

void CallQueue::check_outside() const {
    if (is_inside())
        throw invalid_param(
            1064, name_ + ": a call was made inside another call of the same thread, as by a signal handler; " +
                      "only abort() may be called there");
}

namespace {

bool& worker() {
    [[gnu::tls_model("initial-exec")]] thread_local bool worker = false;
    return worker;
}

}  // namespace

bool CallQueue::on_worker() {
    return worker();
}

void CallQueue::await_turn(uint32_t ticket, bool calls) {
    HeldLock::release_now();
    waiting_.fetch_add(1);
    BlockedThread blocked;
    std::exception_ptr interrupted;
    {
        std::unique_lock lock(mutex_);
        for (auto now = Clock::now(); turns().serving() != ticket; now = Clock::now()) {
            blocked.note_blocked(now);
            hurry();
            turn_.wait_for(lock, slice);
            if (interrupted || !hooks().poll) continue;
            lock.unlock();
            try {
                hooks().poll();
            } catch (...) {
                interrupted = std::current_exception();  // pass the ticket on first
                if (on_interrupt) on_interrupt();
            }
            lock.lock();
        }
    }
    waiting_.fetch_sub(1);
    if (!interrupted) return;
    leave(calls);
    std::rethrow_exception(interrupted);
}

void CallQueue::wake_waiters() {
    const std::lock_guard lock(mutex_);
    turn_.notify_all();
}

WorkPtr CallQueue::submit(std::function<void()> call) {
    check_outside();
    auto work = std::make_shared<Queued>(gate_);
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable())  // before a ticket is taken, which nobody would serve without the thread
        thread_ = quiet_thread("alltoallv-async", "asynchronous calls", [this] { run(); });
    submitted_ = Clock::now();
    queue_.push_back({enter(false).next(), std::move(call), work, dozing_ ? submitted_ + pace : submitted_});
    if (idle_ != nullptr) std::exchange(idle_, nullptr)->end();
    if (!dozing_) items_.notify_one();
    return work;
}

void CallQueue::run_or_submit(const std::function<void()>& call) {
    if (!has_turn() && !on_worker() && busy()) {
        submit(call);
        return;
    }
    const Slot slot(*this);
    call();
}

/// Call with the lock held: queued calls need not wait until they are due.
void CallQueue::hurry() {
    if (queue_.empty() || hurried_) return;
    hurried_ = true;
    items_.notify_one();
}

/// Call with the lock held: runs queued calls until the work is done, unless another thread runs them.
void CallQueue::help(const Work& work, std::unique_lock<std::mutex>& lock) {
    if (waiters_ == Waiters::watch) return;
    ++helpers_;
    while (!work.done() && !queue_.empty() && queue_.front().ticket == turns().serving()) run_front(lock);
    --helpers_;
    if (closing_) turn_.notify_all();
}

/// Call with the lock held; releases it while the call runs.
void CallQueue::run_front(std::unique_lock<std::mutex>& lock) {
    Item item = std::move(queue_.front());
    queue_.pop_front();
    if (queue_.empty()) hurried_ = false;
    lock.unlock();
    if (turns().serving() != item.ticket) await_turn(item.ticket, false);
    std::exception_ptr error, interrupted;
    try {
        const ActiveCall here(key(), true);
        item.call();
    } catch (const Error&) {
        error = std::current_exception();
    } catch (...) {  // the bindings' own exceptions go to the thread that they interrupt, once
        error = std::current_exception();
        if (!on_worker()) {
            interrupted = std::move(error);
            error = std::make_exception_ptr(peer_lost(4001, "the call was interrupted in a thread that waited for it"));
        }
    }
    item.call = nullptr;
    leave(false);
    item.work->finish(std::move(error));
    lock.lock();
    if (interrupted) {
        --helpers_;
        if (closing_) turn_.notify_all();
        lock.unlock();
        std::rethrow_exception(interrupted);
    }
}

/// Call with the lock held: waits until a call is due. Returns false if no more will come.
bool CallQueue::await_item(std::unique_lock<std::mutex>& lock) {
    for (;;) {
        const auto now = Clock::now();
        if (!queue_.empty() && (closing_ || hurried_ || queue_.front().due <= now)) return true;
        if (queue_.empty() && closing_) return false;
        dozing_ = waiters_ == Waiters::help && now - submitted_ < linger;
        if (!queue_.empty()) {
            const auto due = queue_.front().due;  // a copy: a thread that waits for the call may run it meanwhile
            items_.wait_until(lock, due);
        } else {
            BlockedThread blocked;
            blocked.idle();
            idle_ = &blocked;
            dozing_ ? static_cast<void>(items_.wait_for(lock, pace)) : items_.wait(lock);
            idle_ = nullptr;
        }
        dozing_ = false;
    }
}

void CallQueue::run() {
    worker() = true;
    BlockedThread::make_calls();
    std::unique_lock lock(mutex_);
    while (await_item(lock)) run_front(lock);
}

}  // namespace alltoallv
