/// \file call_queue.h
/// \brief Orders the calls of one communicator: first come first served, synchronous and asynchronous alike.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace alltoallv {

/// An asynchronous call. Thread-safe.
class Work {
  public:
    virtual ~Work() = default;

    bool done() const { return done_.load(std::memory_order_acquire); }

    /// False if it has not finished within `seconds` (negative: wait for ever). Throws what the call threw.
    virtual bool wait(double seconds);

    /// What the call threw, or null. Meaningful once done.
    std::exception_ptr error() const { return done() ? error_ : nullptr; }

    /// Once, by who runs the call.
    void finish(std::exception_ptr error);

  private:
    std::atomic<bool> done_{false};
    std::exception_ptr error_;
    std::mutex mutex_;
    std::condition_variable finished_;
};

using WorkPtr = std::shared_ptr<Work>;

class CallQueue {
  public:
    CallQueue() = default;
    ~CallQueue();  // waits for what is queued

    /// Holds the communicator for one synchronous call. Inside a queued call it does nothing: that holds it already.
    class Turn {
      public:
        explicit Turn(CallQueue& queue) : queue_(on_worker_of() == &queue ? nullptr : &queue) {
            if (queue_ != nullptr) queue_->enter(queue_->next_.fetch_add(1));
        }
        ~Turn() {
            if (queue_ != nullptr) queue_->leave();
        }
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;

      private:
        CallQueue* queue_;
    };

    /// Runs `call` on the queue's thread in its turn.
    WorkPtr submit(std::function<void()> call);

    /// Runs `call` here in its turn; behind calls that are pending it submits it, so that nobody waits for them.
    void run_or_submit(const std::function<void()>& call);

    /// True while calls are queued or running.
    bool busy() const { return serving_.load() != next_.load(); }

    /// True on a queue's own thread, where Python must not be entered.
    static bool on_worker() { return on_worker_of() != nullptr; }

    /// Called when a waiting call is interrupted (Ctrl-C), so that those before it do not hold it up.
    std::function<void()> on_interrupt;

  private:
    struct Item {
        uint64_t ticket;
        std::function<void()> call;
        WorkPtr work;
    };

    /// The queue whose thread this is, or null.
    static const CallQueue*& on_worker_of();
    void enter(uint64_t ticket);
    void leave();
    void run();

    std::atomic<uint64_t> next_{0};
    std::atomic<uint64_t> serving_{0};
    std::atomic<int> waiting_{0};
    std::mutex mutex_;
    std::condition_variable turn_;   // serving_ has moved on
    std::condition_variable items_;  // there is work, or no more will come
    std::deque<Item> queue_;
    std::thread thread_;
    bool closing_ = false;
};

}  // namespace alltoallv
