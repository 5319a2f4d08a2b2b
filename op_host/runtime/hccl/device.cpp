#include "runtime/hccl/device.h"

#include <algorithm>

#include "runtime/hccl/library.h"
#include "runtime/hccl/result.h"

namespace alltoallv {
namespace {

constexpr int slice_ms = 20;

/// Calls `synchronize`, which waits for a short time, until it has succeeded. Returns false if `deadline` has passed.
template <class Synchronize>
bool wait_until(Synchronize&& synchronize, const char* call, Clock::time_point deadline, const std::string& where,
                const std::function<void()>& poll) {
    while (true) {
        const aclError result = synchronize();
        if (result == 0) return true;
        if (result != acl_error_rt_stream_sync_timeout) throw acl_error(result, call, where);
        poll();
        if (Clock::now() >= deadline) return false;
    }
}

}  // namespace

DeviceQuery query_devices() {
    DeviceQuery query;
    uint32_t count = 0;
    if (cann().aclrtGetDeviceCount(&count) == 0) query.count = static_cast<int>(count);
    if (const char* name = cann().aclrtGetSocName()) query.soc_name = name;
    return query;
}

Device::Device(int index) : index_(index) {
    const HcclLibrary& acl = cann();
    int32_t current = 0;
    const aclError state = acl.aclrtGetDevice(&current);
    if (index_ < 0) index_ = state == 0 ? current : 0;
    if (state != 0 || current != index_) {
        aclError result = acl.aclrtSetDevice(index_);
        if (result == acl_error_uninitialize) {
            result = acl.aclInit(nullptr);
            if (result != acl_error_repeat_initialize) check_acl(result, "aclInit", "device setup");
            result = acl.aclrtSetDevice(index_);
        }
        check_acl(result, "aclrtSetDevice", "device " + std::to_string(index_));
    }
    check_acl(acl.aclrtGetCurrentContext(&context_), "aclrtGetCurrentContext", "device " + std::to_string(index_));
}

Device::~Device() {
    if (stream_ != nullptr) cann().aclrtDestroyStream(stream_);
}

void Device::bind() const {
    aclrtContext current = nullptr;
    if (cann().aclrtGetCurrentContext(&current) == 0 && current != nullptr) return;
    check_acl(cann().aclrtSetCurrentContext(context_), "aclrtSetCurrentContext", "device " + std::to_string(index_));
}

aclrtStream Device::stream() {
    if (stream_ == nullptr)
        check_acl(cann().aclrtCreateStream(&stream_), "aclrtCreateStream", "device " + std::to_string(index_));
    return stream_;
}

bool Device::wait(const OnStream& on, const std::function<void()>& poll) {
    const auto synchronize = [&on] { return cann().aclrtSynchronizeStreamWithTimeout(on.stream, slice_ms); };
    const bool ours = on.stream == stream_;
    if (ours) stream_ = nullptr;
    if (!wait_until(synchronize, "aclrtSynchronizeStreamWithTimeout", on.limit, on.where, poll)) return false;
    if (ours) stream_ = on.stream;
    return true;
}

bool Device::wait_for_all(Clock::time_point deadline, const std::string& where, const std::function<void()>& poll) {
    if (cann().aclrtSynchronizeDeviceWithTimeout == nullptr) {
        check_acl(cann().aclrtSynchronizeDevice(), "aclrtSynchronizeDevice", where);
        return true;
    }
    const auto synchronize = [] { return cann().aclrtSynchronizeDeviceWithTimeout(slice_ms); };
    return wait_until(synchronize, "aclrtSynchronizeDeviceWithTimeout", deadline, where, poll);
}

void Device::copy(void* to, const void* from, size_t bytes, aclrtMemcpyKind kind, const std::string& where) {
    if (bytes > 0) check_acl(cann().aclrtMemcpy(to, bytes, from, bytes, kind), "aclrtMemcpy", where);
}

void Device::copy_async(void* to, const void* from, size_t bytes, const OnStream& on) {
    if (bytes == 0) return;
    check_acl(cann().aclrtMemcpyAsync(to, bytes, from, bytes, ACL_MEMCPY_DEVICE_TO_DEVICE, on.stream),
              "aclrtMemcpyAsync", on.where);
}

DeviceMemory::DeviceMemory(size_t bytes, const std::string& where) {
    check_acl(cann().aclrtMalloc(&data_, std::max<size_t>(bytes, 1), ACL_MEM_MALLOC_HUGE_FIRST), "aclrtMalloc", where);
}

DeviceMemory::~DeviceMemory() {
    if (std::uncaught_exceptions() <= exceptions_) cann().aclrtFree(data_);
}

}  // namespace alltoallv
