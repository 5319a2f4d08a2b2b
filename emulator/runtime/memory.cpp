#include "runtime/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

#include "acl/acl_api.h"
#include "runtime/failure.h"
#include "runtime/settings.h"

namespace alltoallv::emulator {
namespace {

constexpr unsigned char fresh = 0xA5;

struct Registry {
    std::mutex mutex;
    std::map<uintptr_t, Allocation> allocations;
    std::map<int, size_t> used;  // bytes per device
};

Registry& registry = *new Registry;  // never destroyed: threads use it to the end

std::string hex(const void* address) {
    std::ostringstream text;
    text << address;
    return text.str();
}

const Allocation* find(const void* address) {
    const auto key = reinterpret_cast<uintptr_t>(address);
    auto after = registry.allocations.upper_bound(key);
    if (after == registry.allocations.begin()) return nullptr;
    const Allocation& candidate = std::prev(after)->second;
    return key < reinterpret_cast<uintptr_t>(candidate.address) + candidate.bytes ? &candidate : nullptr;
}

void check_end(const char* what, const Allocation& allocation, const void* address, size_t bytes) {
    const size_t offset = static_cast<size_t>(static_cast<const char*>(address) - allocation.address);
    if (bytes <= allocation.bytes - offset) return;
    throw Failure(acl_error_rt_param_invalid, what, " is byte ", offset, " of an allocation of ", allocation.bytes,
                  " bytes, and ", bytes, " bytes from there leave it");
}

void take(int device, size_t bytes) {
    const size_t total = static_cast<size_t>(settings().memory_mb) << 20;
    size_t& used = registry.used[device];
    const size_t left = total - std::min(used, total);  // the setting may have been lowered since
    if (bytes > left)
        throw Failure(acl_error_rt_memory_allocation, "device ", device, " has ", left, " of ", total,
                      " bytes free, asked for ", bytes);
    used += bytes;
}

}  // namespace

Reserved::Reserved(int device, size_t bytes) : device_(device), bytes_(bytes) {
    const std::lock_guard lock(registry.mutex);
    take(device, bytes);
}

Reserved::~Reserved() {
    const std::lock_guard lock(registry.mutex);
    registry.used[device_] -= bytes_;
}

void* allocate(MemoryKind kind, int device, size_t bytes) {
    if (bytes == 0) throw Failure(acl_error_rt_param_invalid, "size is 0, expected at least 1");
    const std::lock_guard lock(registry.mutex);
    if (kind == MemoryKind::device) take(device, bytes);
    void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
        if (kind == MemoryKind::device) registry.used[device] -= bytes;
        throw Failure(acl_error_rt_memory_allocation, "the host has no ", bytes, " bytes left");
    }
    if (kind == MemoryKind::device) std::memset(address, fresh, bytes);
    registry.allocations[reinterpret_cast<uintptr_t>(address)] = {static_cast<char*>(address), bytes, kind, device,
                                                                  false};
    return address;
}

void register_host(void* address, size_t bytes) {
    const std::lock_guard lock(registry.mutex);
    if (address == nullptr || bytes == 0) throw Failure(acl_error_rt_param_invalid, "ptr is null or size is 0");
    if (find(address) != nullptr)
        throw Failure(acl_error_rt_param_invalid, "ptr ", hex(address), " is registered or allocated already");
    registry.allocations[reinterpret_cast<uintptr_t>(address)] = {static_cast<char*>(address), bytes, MemoryKind::host,
                                                                  -1, true};
}

void free_memory(MemoryKind kind, void* address) {
    const std::lock_guard lock(registry.mutex);
    const auto found = registry.allocations.find(reinterpret_cast<uintptr_t>(address));
    if (found == registry.allocations.end() || found->second.kind != kind || found->second.registered)
        throw Failure(acl_error_rt_param_invalid, hex(address),
                      " is not an allocation of this kind, or was freed before");
    if (kind == MemoryKind::device) registry.used[found->second.device] -= found->second.bytes;
    munmap(address, found->second.bytes);
    registry.allocations.erase(found);
}

void unregister_host(void* address) {
    const std::lock_guard lock(registry.mutex);
    const auto found = registry.allocations.find(reinterpret_cast<uintptr_t>(address));
    if (found == registry.allocations.end() || !found->second.registered || found->second.kind != MemoryKind::host)
        throw Failure(acl_error_rt_param_invalid, hex(address), " is not registered");
    registry.allocations.erase(found);
}

void know_device_memory(void* address, size_t bytes, int device) {
    const std::lock_guard lock(registry.mutex);
    registry.allocations[reinterpret_cast<uintptr_t>(address)] = {static_cast<char*>(address), bytes,
                                                                  MemoryKind::device, device, true};
}

void forget_device_memory(void* address) {
    const std::lock_guard lock(registry.mutex);
    registry.allocations.erase(reinterpret_cast<uintptr_t>(address));
}

std::optional<Allocation> find_allocation(const void* address) {
    const std::lock_guard lock(registry.mutex);
    const Allocation* found = find(address);
    return found == nullptr ? std::nullopt : std::optional(*found);
}

void check_device_range(const char* what, const void* address, size_t bytes) {
    if (bytes == 0) return;
    const std::optional<Allocation> found = find_allocation(address);
    if (!found || found->kind != MemoryKind::device)
        throw Failure(acl_error_rt_param_invalid, what, " ", hex(address), " is not device memory",
                      (found ? " but host memory" : ", or was freed"));
    check_end(what, *found, address, bytes);
}

void check_host_range(const char* what, const void* address, size_t bytes) {
    if (bytes == 0) return;
    if (address == nullptr) throw Failure(acl_error_rt_param_invalid, what, " is null");
    const std::optional<Allocation> found = find_allocation(address);
    if (!found) return;  // pageable memory, of unknown bounds
    if (found->kind == MemoryKind::device)
        throw Failure(acl_error_rt_param_invalid, what, " ", hex(address),
                      " is device memory, expected host memory for this kind of copy");
    check_end(what, *found, address, bytes);
}

Usage memory_usage(int device) {
    const std::lock_guard lock(registry.mutex);
    const size_t total = static_cast<size_t>(settings().memory_mb) << 20;
    return {total - std::min(registry.used[device], total), total};
}

}  // namespace alltoallv::emulator
