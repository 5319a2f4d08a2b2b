/// \file call_queue.h
/// \brief Orders the calls of one communicator: first come first served, synchronous and asynchronous alike.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "runtime/base/fork_generation.h"
#include "runtime/core/active_call.h"
#include "runtime/core/blocked_thread.h"

namespace alltoallv {

/// An asynchronous call. Thread-safe.
class Work {
  public:
    virtual ~Work() = default;

    bool done() const { return done_.load(std::memory_order_acquire); }

    /// False if it has not finished within `seconds` (negative: wait for ever). Throws what the call threw, and an
    /// error in a forked child, where the call does not run.
    bool wait(double seconds);

    /// Returns the call's exception, or null. Meaningful once done.
    std::exception_ptr error() const { return done() ? error_ : nullptr; }

    /// Called once, by the thread that runs the call.
    void finish(std::exception_ptr error);

  protected:
    virtual bool await(double seconds);

  private:
    const uint32_t generation_ = fork_generation();
    std::atomic<bool> done_{false};
    std::exception_ptr error_;
    std::mutex mutex_;
    std::condition_variable finished_;
};

using WorkPtr = std::shared_ptr<Work>;

class CallQueue {
  public:
    /// `help` lets a thread that waits for a call run it.
    enum class Waiters { watch, help };

    /// `name` is for errors.
    explicit CallQueue(Waiters waiters = Waiters::watch, std::string name = "a queue");
    ~CallQueue();  // waits for queued calls

    /// Holds the communicator for one synchronous call. Inside a queued call, which holds it already, it does nothing;
    /// inside any other call of this thread it throws invalid_param, since it would wait for itself.
    class Slot {
      public:
        /// `calls`: made for the program, whose threads must not call at the same time.
        explicit Slot(CallQueue& queue, bool calls = false)
            : queue_(queue.has_turn() ? nullptr : &queue), here_(queue.key()), calls_(calls) {
            if (queue_ == nullptr) return;
            const uint64_t ticket = queue_->next_.fetch_add(1);
            if (queue_->serving_.load() != ticket) overlaps_ = queue_->await_turn(ticket, calls_);
            if (calls_) queue_->held_by_caller_.store(true, std::memory_order_relaxed);
        }
        ~Slot() {
            if (queue_ == nullptr) return;
            if (calls_) queue_->held_by_caller_.store(false, std::memory_order_relaxed);
            queue_->leave();
        }
        /// True if it came while another thread's call was running or waiting.
        bool overlaps() const { return overlaps_; }
        /// True if another thread's call waits behind it.
        bool is_joined() const { return queue_ != nullptr && queue_->callers_waiting_.load() > 0; }
        Slot(const Slot&) = delete;
        Slot& operator=(const Slot&) = delete;

      private:
        CallQueue* queue_;
        const ActiveCall here_;
        bool calls_, overlaps_ = false;
    };

    /// Runs `call` in its turn, on the queue's thread or on one that waits for the work. While calls follow each other
    /// closely, the thread polls every `pace` instead of being woken, since waking costs more than a small call.
    WorkPtr submit(std::function<void()> call);

    /// Runs `call` here in its turn; if calls are pending, submits it behind them, so that nobody waits for them.
    void run_or_submit(const std::function<void()>& call);

    /// True while calls are queued or running.
    bool busy() const { return serving_.load() != next_.load(); }

    /// Stands for this queue, as long as its works live.
    const void* key() const { return gate_.get(); }

    /// True if this thread is inside a call that has this queue's key.
    bool is_inside() const { return ActiveCall::of(key()) != nullptr; }

    /// Throws invalid_param if so.
    void check_outside() const;

    /// True on a queue's own thread, which must not enter Python.
    static bool on_worker();

    /// Called when a waiting call is interrupted (Ctrl-C), so that earlier calls do not delay it.
    std::function<void()> on_interrupt;

  private:
    struct Item {
        uint64_t ticket;
        std::function<void()> call;
        WorkPtr work;
        std::chrono::steady_clock::time_point due;  // for the queue's thread
    };
    /// How works reach the queue, which may end before them.
    struct Gate {
        std::mutex mutex;
        CallQueue* queue;
    };
    class Queued;

    /// True in a queued call before its operator; otherwise like `check_outside`.
    bool has_turn() const {
        const ActiveCall* const outer = ActiveCall::of(key());
        if (outer != nullptr && !outer->queued()) check_outside();
        return outer != nullptr;
    }
    bool await_turn(uint64_t ticket, bool calls);
    void leave() {
        serving_.fetch_add(1);
        if (waiting_.load() > 0) wake_waiters();
    }
    void wake_waiters();
    void run();
    bool await_item(std::unique_lock<std::mutex>& lock);
    void run_front(std::unique_lock<std::mutex>& lock);
    void help(const Work& work, std::unique_lock<std::mutex>& lock);
    void hurry();

    const Waiters waiters_;
    const std::string name_;
    const std::shared_ptr<Gate> gate_;
    std::mutex& mutex_;
    std::atomic<uint64_t> next_{0};
    std::atomic<uint64_t> serving_{0};
    std::atomic<int> waiting_{0}, callers_waiting_{0};
    std::atomic<bool> held_by_caller_{false};
    std::condition_variable turn_;   // serving_ has changed
    std::condition_variable items_;  // there is work, or no more will come
    BlockedThread* idle_ = nullptr;  // of the queue's thread, while no calls are queued
    std::deque<Item> queue_;
    std::thread thread_;
    std::chrono::steady_clock::time_point submitted_;  // time of the last submit
    int helpers_ = 0;                                  // threads other than the queue's own that run calls here
    bool dozing_ = false;                              // the queue's thread will look without being woken
    bool hurried_ = false;                             // queued calls are due now
    bool closing_ = false;
};

}  // namespace alltoallv
