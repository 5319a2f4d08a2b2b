#include "core/call_queue.h"

#include <chrono>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/processors.h"
#include "base/quiet_thread.h"
#include "core/hooks.h"
#include "core/waiting.h"

namespace alltoallv {
namespace {

constexpr auto slice = std::chrono::milliseconds(100);

}  // namespace

bool Work::wait(double seconds) {
    const auto start = Clock::now();
    std::optional<Waiting> waiting;
    if (seconds < 0 && !done()) waiting.emplace();
    std::unique_lock lock(mutex_);
    while (!done_.load(std::memory_order_acquire)) {
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

CallQueue::~CallQueue() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
        items_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
}

const CallQueue*& CallQueue::on_worker_of() {
    [[gnu::tls_model("initial-exec")]] thread_local const CallQueue* queue = nullptr;
    return queue;
}

void CallQueue::enter(uint64_t ticket) {
    if (serving_.load() == ticket) return;
    waiting_.fetch_add(1);
    const Waiting waiting;
    std::exception_ptr interrupted;
    {
        std::unique_lock lock(mutex_);
        while (serving_.load() != ticket) {
            turn_.wait_for(lock, slice);
            if (interrupted || !hooks().poll) continue;
            lock.unlock();
            try {
                hooks().poll();
            } catch (...) {
                interrupted = std::current_exception();  // the ticket must be passed on first
                if (on_interrupt) on_interrupt();
            }
            lock.lock();
        }
    }
    waiting_.fetch_sub(1);
    if (!interrupted) return;
    leave();
    std::rethrow_exception(interrupted);
}

void CallQueue::leave() {
    serving_.fetch_add(1);
    if (waiting_.load() == 0) return;
    const std::lock_guard lock(mutex_);
    turn_.notify_all();
}

WorkPtr CallQueue::submit(std::function<void()> call) {
    auto work = std::make_shared<Work>();
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable())  // before a ticket is taken, which nobody would serve without it
        thread_ = quiet_thread("alltoallv-async", "asynchronous calls", [this] { run(); });
    queue_.push_back({next_.fetch_add(1), std::move(call), work});
    items_.notify_one();
    return work;
}

void CallQueue::run_or_submit(const std::function<void()>& call) {
    if (!on_worker() && busy()) {
        submit(call);
        return;
    }
    const Turn turn(*this);
    call();
}

void CallQueue::run() {
    on_worker_of() = this;
    Waiting::make_calls();
    for (;;) {
        Item item;
        {
            const Waiting waiting;
            std::unique_lock lock(mutex_);
            items_.wait(lock, [&] { return closing_ || !queue_.empty(); });
            if (queue_.empty()) return;
            item = std::move(queue_.front());
            queue_.pop_front();
        }
        enter(item.ticket);
        std::exception_ptr error;
        try {
            item.call();
        } catch (...) {
            error = std::current_exception();
        }
        item.call = nullptr;
        leave();
        item.work->finish(std::move(error));
    }
}

}  // namespace alltoallv
