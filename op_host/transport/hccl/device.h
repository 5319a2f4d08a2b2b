// The NPU of a communicator: its context for every thread, memory, copies, waiting for a stream.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>

#include "abi/hccl.h"

namespace alltoallv {

/// What a query of the visible devices tells.
struct DeviceQuery {
    std::string soc_name;
    int count = -1;  ///< negative: the query failed
};

/// Throws backend_unavailable where CANN is absent.
DeviceQuery query_devices();

class Device {
  public:
    /// `index` < 0: the calling thread's current one. Sets ACL up where nobody has.
    explicit Device(int index);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    /// Makes the device the calling thread's if that thread has none.
    void bind() const;

    int index() const { return index_; }

    /// A stream of our own, made at first use. Only in the communicator's turn.
    aclrtStream stream();

    /// Waits until everything on `stream` is done; calls `poll` about every 20 ms, which may throw to give up.
    /// False when `deadline` has passed first. Throws `Error` for what failed on the device. A stream of ours that did
    /// not come to its end is left as it is: to destroy one means to wait for what is on it.
    bool wait(aclrtStream stream, std::chrono::steady_clock::time_point deadline, const std::string& where,
              const std::function<void()>& poll);

    /// The same for everything on the calling thread's device, whoever has enqueued it.
    static bool wait_for_all(std::chrono::steady_clock::time_point deadline, const std::string& where,
                             const std::function<void()>& poll);

    static void copy(void* to, const void* from, size_t bytes, aclrtMemcpyKind kind, const std::string& where);
    static void copy_async(void* to, const void* from, size_t bytes, aclrtStream stream, const std::string& where);

  private:
    int index_ = 0;
    aclrtContext context_ = nullptr;
    aclrtStream stream_ = nullptr;
};

/// Gives the calling thread the device back that it had before; it keeps its new one if it had none.
class KeepDevice {
  public:
    KeepDevice();
    ~KeepDevice();
    KeepDevice(const KeepDevice&) = delete;
    KeepDevice& operator=(const KeepDevice&) = delete;

  private:
    int32_t device_ = -1;
};

/// Memory on the current device. When an exception takes it down it is not freed: what nobody has waited for may use
/// it.
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
