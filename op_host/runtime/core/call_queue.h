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
            const Turns before = queue_->enter(calls_);
            overlaps_ = calls_ && before.callers() > 0;
            if (before.present() > 0) queue_->await_turn(before.next(), calls_);
        }
        ~Slot() {
            if (queue_ != nullptr) queue_->leave(calls_);
        }
        /// True if it came while another thread's call was running or waiting.
        bool overlaps() const { return overlaps_; }
        /// True if another thread's call waits behind it, which knows that it overlaps.
        bool is_joined() const { return queue_ != nullptr && queue_->turns().callers() > 1; }
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
    bool busy() const { return turns().present() > 0; }

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
    /// Who is served and who is there, in one word: whoever comes learns both at once.
    struct Turns {
        static constexpr uint64_t caller = 1, call = uint64_t{1} << 16, served = uint64_t{1} << 40;
        static constexpr uint32_t tickets = (1 << 24) - 1;  // a mask: they start again at 0

        uint32_t callers() const { return word & 0xffff; }  // of the calls, those for the program
        uint32_t present() const { return static_cast<uint32_t>(word >> 16) & tickets; }
        uint32_t serving() const { return static_cast<uint32_t>(word >> 40); }
        uint32_t next() const { return (serving() + present()) & tickets; }

        uint64_t word;
    };
    struct Item {
        uint32_t ticket;
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
    Turns turns() const { return {turns_.load()}; }
    /// Returns what was before: `next` is the ticket of this call.
    Turns enter(bool calls) { return {turns_.fetch_add(Turns::call + (calls ? Turns::caller : 0))}; }
    void await_turn(uint32_t ticket, bool calls);
    void leave(bool calls) {
        turns_.fetch_add(Turns::served - Turns::call - (calls ? Turns::caller : 0));
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
    std::atomic<uint64_t> turns_{0};
    std::atomic<int> waiting_{0};
    std::condition_variable turn_;   // another call is served
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
