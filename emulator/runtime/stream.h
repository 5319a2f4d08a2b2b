// Streams: each has a thread, which runs tasks one after the other, later than the call that queued them.
//
// A thread that waits for a stream runs its waiting tasks itself.
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
    /// A task returns 0 or the code of a failure that it has reported.
    using Task = std::function<int()>;

    explicit Stream(int device);
    ~Stream();  // waits for queued tasks

    /// Runs the task after those before it. `delayed` tasks are late by what the setting task_delay_us is now.
    void enqueue(Task task, bool delayed = true);

    /// Completes `record` when the stream reaches it, with the stream's failure if it has one.
    void record(std::shared_ptr<Record> record);

    /// Holds the stream until the record completes, and takes over its failure; after `seconds` (negative: no limit)
    /// the failure is a timeout.
    void wait(std::shared_ptr<Record> record, double seconds);

    /// Drops the tasks that have not begun. Waits for events among them end with this failure.
    void discard(int failure);

    /// If set, the stream runs nothing after its next failure. Queued tasks then fail with that failure.
    void stop_on_failure(bool stops);

    /// Waits until all tasks that are queued now have run, or runs them. Returns false if they have not after `seconds`
    /// (negative: no limit).
    bool synchronize(double seconds);

    /// Returns the first failure since the last call of this function; 0 if there was none.
    int take_failure();

    bool idle() const;

    /// True if it is idle and nothing of it has failed.
    bool quiet() const;

    /// The value that aclrtSetStreamOverflowSwitch has set; it has no effect.
    std::atomic<uint32_t> overflow_switch{0};

    /// The thread that aclrtSubscribeReport has named; 0: none.
    std::atomic<uint64_t> subscriber{0};

    int device() const { return device_; }
    int id() const { return id_; }

  private:
    struct Item {
        Task task;
        int64_t delay_us;
        std::shared_ptr<Record> record;  ///< the record that it completes, or null
    };

    void enqueue(Item item);

    /// Runs tasks in this thread, until the record is complete or another thread runs one.
    void advance(const Record& record);

    void run();

    /// True if a task may begin now.
    bool ready() const { return !running_ && !items_.empty(); }

    /// Runs the first task in this thread, with the lock released.
    void run_next(std::unique_lock<std::mutex>& lock);

    const int device_, id_;
    mutable std::mutex mutex_;
    std::condition_variable queued_, progressed_;
    std::deque<Item> items_;
    uint64_t enqueued_ = 0, finished_ = 0;
    int failure_ = 0;
    std::optional<bool> stops_;
    int stopped_ = 0;  ///< the failure that stopped the stream
    bool closing_ = false;
    bool running_ = false;  ///< a task is running
    std::thread thread_;
};

using StreamPtr = std::shared_ptr<Stream>;

/// Handles as ACL returns them. A destroyed handle is never valid again.
void* add_stream(int device);

/// Returns the stream of a handle; null means the default stream of this thread's device. Throws Failure for an invalid
/// handle, or one of a device other than this thread's.
StreamPtr stream_of(void* handle);

/// True if the stream of the handle, of whatever device, is quiet; false for null and for an invalid handle.
bool is_quiet(void* handle);

/// Makes the handle invalid. The stream ends when its tasks have run.
StreamPtr remove_stream(void* handle);

/// Returns all streams of a device.
std::vector<StreamPtr> streams_of_device(int device);

}  // namespace alltoallv::emulator
