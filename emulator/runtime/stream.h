// Streams: a thread each, which runs tasks one after the other, later than the call that queued them.
//
// A thread that waits for a stream runs tasks that have not begun itself.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/event.h"

namespace alltoallv::emulator {

class Stream {
  public:
    /// Returns 0 or the code of a failure that it has reported.
    using Task = std::function<int()>;

    explicit Stream(int device);
    ~Stream();  // after what is queued

    /// Runs the task after those before it. `delayed` tasks come late by the setting task_delay_us.
    void enqueue(Task task, bool delayed = true);

    /// Completes `record` when the stream gets there, with the stream's failure if it has one.
    void record(std::shared_ptr<Record> record);

    /// Holds the stream until the record completes, and takes over its failure; that of a timeout after `seconds`
    /// (negative: no limit).
    void wait(std::shared_ptr<Record> record, double seconds);

    /// Forgets the tasks that have not begun. Whoever waits for an event among them goes on, with this failure.
    void discard(int failure);

    /// From the next failure on, the stream runs nothing. What is queued then fails with that failure.
    void stop_on_failure(bool stops);

    /// Waits until all that is queued now has run, or runs it. False if it has not within `seconds` (negative: no
    /// limit).
    bool synchronize(double seconds);

    /// The first failure since the last call of this function; 0 if there was none.
    int take_failure();

    bool idle() const;

    /// What aclrtSetStreamOverflowSwitch has set. Nothing here overflows.
    std::atomic<uint32_t> overflow_switch{0};

    int device() const { return device_; }
    int id() const { return id_; }

  private:
    struct Item {
        Task task;
        bool delayed;
        std::shared_ptr<Record> record;  ///< what it completes, or null
    };

    void enqueue(Item item);

    /// Runs tasks in this thread, until the record is complete or another thread runs one.
    void advance(const Record& record);

    void run();

    /// Whether a task may begin now.
    bool ready() const { return !running_ && !items_.empty(); }

    /// Runs the first task in this thread, while the lock is released.
    void run_next(std::unique_lock<std::mutex>& lock);

    const int device_, id_;
    mutable std::mutex mutex_;
    std::condition_variable queued_, progressed_;
    std::deque<Item> items_;
    uint64_t enqueued_ = 0, finished_ = 0;
    int failure_ = 0;
    std::optional<bool> stops_;
    int stopped_ = 0;  ///< the failure that did it
    bool closing_ = false;
    bool running_ = false;  ///< a task is
    std::thread thread_;
};

using StreamPtr = std::shared_ptr<Stream>;

/// Handles as ACL gives them out. A destroyed handle is never valid again.
void* add_stream(int device);

/// The stream of a handle; null stands for the default stream of this thread's device. Throws Failure for a handle that
/// is none, or of a device other than this thread's.
StreamPtr stream_of(void* handle);

/// Takes the handle back. The stream ends when its tasks have run.
StreamPtr remove_stream(void* handle);

/// All streams of a device that exist.
std::vector<StreamPtr> streams_of_device(int device);

}  // namespace alltoallv::emulator
