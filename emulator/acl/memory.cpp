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
    if (count > destMax) throw Failure(acl_error_rt_param_invalid, "count is ", count, ", destMax only ", destMax);
    if (kind < ACL_MEMCPY_HOST_TO_HOST || kind > ACL_MEMCPY_DEFAULT)
        throw Failure(acl_error_rt_param_invalid, "kind is ", kind, ", expected 0 to 4");
    const auto is_device = [kind](const void* address, aclrtMemcpyKind from_or_to_host) {
        if (kind != ACL_MEMCPY_DEFAULT) return kind == from_or_to_host || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
        const auto found = find_allocation(address);
        return found && found->kind == MemoryKind::device;
    };
    check_side("dst", is_device(dst, ACL_MEMCPY_HOST_TO_DEVICE), dst, count);
    check_side("src", is_device(src, ACL_MEMCPY_DEVICE_TO_HOST), src, count);
}

void check_fill(const void* address, size_t maxCount, size_t count) {
    if (count > maxCount) throw Failure(acl_error_rt_param_invalid, "count is ", count, ", maxCount only ", maxCount);
    const auto found = find_allocation(address);
    check_side("devPtr", !found || found->kind == MemoryKind::device, address, count);
}

/// Runs `task` after `check`, which has passed in the call and may throw again: memory may have been freed since.
template <class Check, class Task>
void enqueue_checked(const char* function, aclrtStream stream, Check check, Task task) {
    check();
    stream_of(stream)->enqueue([=, where = std::string(function) + ", on its stream"] {
        try {
            check();
        } catch (const Failure& failure) {
            return report(where.c_str(), failure.code(), failure.what());
        }
        task();
        return 0;
    });
}

void copy(void* dst, const void* src, size_t count) {
    if (count > 0) std::memmove(dst, src, count);
}

void fill(void* devPtr, int32_t value, size_t count) {
    if (count > 0) std::memset(devPtr, value, count);
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

aclError aclrtMemGetAddressRange(void* ptr, void** pbase, size_t* psize) {
    ACL_FUNCTION({
        const auto found = find_allocation(ptr);
        if (!found || found->kind != MemoryKind::device)
            throw Failure(acl_error_rt_param_invalid, "ptr is not in the memory of a device");
        check_pointer("pbase", pbase);
        *pbase = found->address;
        give("psize", psize, found->bytes);
    });
}

aclError aclrtReserveMemAddress(void** virPtr, size_t size, size_t alignment, void* expectPtr, uint64_t) {
    ACL_FUNCTION({
        check_pointer("virPtr", virPtr);
        if (alignment != 0) throw Failure(acl_error_rt_param_invalid, "alignment is ", alignment, ", expected 0");
        if (expectPtr != nullptr) throw Failure(acl_error_rt_param_invalid, "expectPtr is an address, expected null");
        *virPtr = reserve_addresses(size);
    });
}

aclError aclrtReleaseMemAddress(void* virPtr) {
    ACL_FUNCTION(release_addresses(virPtr););
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t size, const aclrtPhysicalMemProp* prop, uint64_t) {
    ACL_FUNCTION({
        check_pointer("handle", handle);
        check_pointer("prop", prop);
        if (prop->location.type != ACL_MEM_LOCATION_TYPE_DEVICE)
            throw Failure(acl_error_rt_param_invalid, "prop's location is not a device");
        *handle = allocate_physical(static_cast<int>(prop->location.id), size);
    });
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    ACL_FUNCTION(free_physical(static_cast<Physical*>(handle)););
}

aclError aclrtMapMem(void* virPtr, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
    ACL_FUNCTION(map_memory(virPtr, size, offset, static_cast<Physical*>(handle)););
}

aclError aclrtUnmapMem(void* virPtr) {
    ACL_FUNCTION(unmap_memory(virPtr););
}

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp*, aclrtMemGranularityOptions, size_t* granularity) {
    ACL_FUNCTION(give("granularity", granularity, memory_granularity););
}

/// Runs at once, independent of streams: a caller that has not waited for them sees old data.
aclError aclrtMemcpy(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind) {
    ACL_FUNCTION(check_copy(dst, destMax, src, count, kind); copy(dst, src, count););
}

/// Reads the source when the stream reaches the copy, also from pageable host memory.
aclError aclrtMemcpyAsync(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream) {
    ACL_FUNCTION(enqueue_checked(
                     "aclrtMemcpyAsync", stream, [=] { check_copy(dst, destMax, src, count, kind); },
                     [=] { copy(dst, src, count); }););
}

aclError aclrtMemset(void* devPtr, size_t maxCount, int32_t value, size_t count) {
    ACL_FUNCTION(check_fill(devPtr, maxCount, count); fill(devPtr, value, count););
}

aclError aclrtMemsetAsync(void* devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream) {
    ACL_FUNCTION(enqueue_checked(
                     "aclrtMemsetAsync", stream, [=] { check_fill(devPtr, maxCount, count); },
                     [=] { fill(devPtr, value, count); }););
}
