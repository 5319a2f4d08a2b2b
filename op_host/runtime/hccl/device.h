// The NPU of a communicator: sets its context for every thread, allocates memory, copies, and waits for streams.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

#include "runtime/abi/hccl.h"
#include "runtime/base/processors.h"

namespace alltoallv {

/// The result of a query for visible devices.
struct DeviceQuery {
    std::string soc_name;
    int count = -1;  ///< negative: the query failed
};

/// Throws backend_unavailable if CANN is absent.
DeviceQuery query_devices();

/// What the calls of an operator share: the stream on which they enqueue, the time until which the host waits for it,
/// and the beginning of their errors' texts.
struct OnStream {
    aclrtStream stream;
    Clock::time_point limit;
    std::string where;
};

class Device {
  public:
    /// `index` < 0 means the calling thread's current device. Initializes ACL if nobody has.
    explicit Device(int index);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    /// Makes the device the current one of the calling thread if that thread has none.
    void bind() const;

    int index() const { return index_; }

    /// Returns our own stream, made at first use. Call it only in the communicator's turn.
    aclrtStream stream();

    /// Waits until everything on the stream is done; calls `poll` about every 20 ms, which may throw to stop. Returns
    /// false if the limit has passed first. Throws `Error` if something failed on the device. A stream of ours that did
    /// not finish is not destroyed, because that would wait for its work.
    bool wait(const OnStream& on, const std::function<void()>& poll);

    /// Waits for everything on the calling thread's device, whoever has enqueued it.
    static bool wait_for_all(Clock::time_point deadline, const std::string& where, const std::function<void()>& poll);

    static void copy(void* to, const void* from, size_t bytes, aclrtMemcpyKind kind, const std::string& where);
    static void copy_async(void* to, const void* from, size_t bytes, const OnStream& on);

  private:
    int index_ = 0;
    aclrtContext context_ = nullptr;
    aclrtStream stream_ = nullptr;
};

/// Memory on the current device. It is not freed during an exception, because enqueued work that nobody has waited for
/// may still use it.
class DeviceMemory {
  public:
    DeviceMemory(size_t bytes, const std::string& where);
    ~DeviceMemory();
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    char* data() const { return static_cast<char*>(data_); }

  private:
    void* data_ = nullptr;
    int exceptions_ = std::uncaught_exceptions();
};

}  // namespace alltoallv
