// ACL functions about memory. Copies check both ends against the allocations, when called and again when they run.
#include "runtime/memory.h"

#include <unistd.h>

#include <cstring>

#include "acl/arguments.h"
#include "runtime/device.h"
#include "runtime/stream.h"

using namespace alltoallv::emulator;

namespace {

void check_side(const char* name, bool device, const void* address, size_t bytes) {
    if (device)
        check_device_range(name, address, bytes);
    else
        check_host_range(name, address, bytes);
}

void check_copy(const void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind) {
    if (count > destMax)
        throw Failure(acl_error_rt_param_invalid,
                      "count is " + std::to_string(count) + ", destMax only " + std::to_string(destMax));
    switch (kind) {
        case ACL_MEMCPY_HOST_TO_HOST:
        case ACL_MEMCPY_HOST_TO_DEVICE:
        case ACL_MEMCPY_DEVICE_TO_HOST:
        case ACL_MEMCPY_DEVICE_TO_DEVICE:
            check_side("dst", kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE, dst, count);
            check_side("src", kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE, src, count);
            return;
        case ACL_MEMCPY_DEFAULT: {  // by the addresses
            for (const auto& [name, address] : {std::pair{"dst", dst}, std::pair{"src", src}}) {
                const auto found = find_allocation(address);
                check_side(name, found && found->kind == MemoryKind::device, address, count);
            }
            return;
        }
    }
    throw Failure(acl_error_rt_param_invalid, "kind is " + std::to_string(kind) + ", expected 0 to 4");
}

void check_fill(const void* address, size_t maxCount, size_t count) {
    if (count > maxCount)
        throw Failure(acl_error_rt_param_invalid,
                      "count is " + std::to_string(count) + ", maxCount only " + std::to_string(maxCount));
    const auto found = find_allocation(address);
    check_side("devPtr", !found || found->kind == MemoryKind::device, address, count);
}

}  // namespace

aclError aclrtMalloc(void** devPtr, size_t size, aclrtMemMallocPolicy) {
    ACL_FUNCTION(check_pointer("devPtr", devPtr); *devPtr = allocate(MemoryKind::device, current_device(), size););
}

aclError aclrtMallocAlign32(void** devPtr, size_t size, aclrtMemMallocPolicy) {
    ACL_FUNCTION(check_pointer("devPtr", devPtr); *devPtr = allocate(MemoryKind::device, current_device(), size););
}

aclError aclrtFree(void* devPtr) {
    ACL_FUNCTION(free_memory(MemoryKind::device, devPtr););
}

aclError aclrtMallocHost(void** hostPtr, size_t size) {
    ACL_FUNCTION(check_pointer("hostPtr", hostPtr); *hostPtr = allocate(MemoryKind::host, -1, size););
}

aclError aclrtFreeHost(void* hostPtr) {
    ACL_FUNCTION(free_memory(MemoryKind::host, hostPtr););
}

aclError aclrtHostRegister(void* ptr, uint64_t size, aclrtHostRegisterType, void** devPtr) {
    ACL_FUNCTION(check_pointer("devPtr", devPtr); register_host(ptr, size); *devPtr = ptr;);
}

aclError aclrtHostRegisterV2(void* ptr, uint64_t size, uint32_t) {
    ACL_FUNCTION(register_host(ptr, size););
}

aclError aclrtHostUnregister(void* ptr) {
    ACL_FUNCTION(unregister_host(ptr););
}

aclError aclrtPointerGetAttributes(const void* ptr, aclrtPtrAttributes* attributes) {
    ACL_FUNCTION({
        check_pointer("attributes", attributes);
        const auto found = find_allocation(ptr);
        *attributes = aclrtPtrAttributes{};
        attributes->pageSize = static_cast<uint32_t>(sysconf(_SC_PAGESIZE));
        attributes->location.type = !found                              ? ACL_MEM_LOCATION_TYPE_UNREGISTERED
                                    : found->kind == MemoryKind::device ? ACL_MEM_LOCATION_TYPE_DEVICE
                                                                        : ACL_MEM_LOCATION_TYPE_HOST;
        if (found && found->kind == MemoryKind::device) attributes->location.id = static_cast<uint32_t>(found->device);
    });
}

/// Runs at once, independent of streams: a caller that has not waited for them sees old data.
aclError aclrtMemcpy(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind) {
    ACL_FUNCTION(check_copy(dst, destMax, src, count, kind); if (count > 0) std::memmove(dst, src, count););
}

/// Reads the source when the stream reaches the copy, also from pageable host memory.
aclError aclrtMemcpyAsync(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream) {
    ACL_FUNCTION({
        check_copy(dst, destMax, src, count, kind);
        stream_of(stream)->enqueue([=] {
            try {
                check_copy(dst, destMax, src, count, kind);
            } catch (const Failure& failure) {
                return report("aclrtMemcpyAsync, on its stream", failure.code(), failure.what());
            }
            if (count > 0) std::memmove(dst, src, count);
            return 0;
        });
    });
}

aclError aclrtMemset(void* devPtr, size_t maxCount, int32_t value, size_t count) {
    ACL_FUNCTION(check_fill(devPtr, maxCount, count); if (count > 0) std::memset(devPtr, value, count););
}

aclError aclrtMemsetAsync(void* devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream) {
    ACL_FUNCTION({
        check_fill(devPtr, maxCount, count);
        stream_of(stream)->enqueue([=] {
            try {
                check_fill(devPtr, maxCount, count);
            } catch (const Failure& failure) {
                return report("aclrtMemsetAsync, on its stream", failure.code(), failure.what());
            }
            if (count > 0) std::memset(devPtr, value, count);
            return 0;
        });
    });
}
