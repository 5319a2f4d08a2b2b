#include "runtime/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include "acl/acl_api.h"
#include "runtime/failure.h"
#include "runtime/settings.h"

namespace alltoallv::emulator {

struct Physical {
    int device;
    size_t bytes;
    int file;
    int mapped;  // how often
};

namespace {

constexpr unsigned char fresh = 0xA5;
constexpr size_t fresh_beginning = size_t{64} << 10;  // of each `memory_granularity` of memory that is mapped

struct Registry {
    std::mutex mutex;
    std::map<uintptr_t, Allocation> allocations;
    std::map<int, size_t> used;            // bytes per device
    std::map<uintptr_t, size_t> reserved;  // addresses for mapped memory
    std::map<uintptr_t, Physical*> mapped;
    std::set<Physical*> physical;
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

/// Returns the reservation that holds the range.
std::map<uintptr_t, size_t>::iterator reservation(uintptr_t address, size_t bytes) {
    auto after = registry.reserved.upper_bound(address);
    if (after == registry.reserved.begin()) return registry.reserved.end();
    --after;
    const bool inside = address - after->first < after->second && bytes <= after->second - (address - after->first);
    return inside ? after : registry.reserved.end();
}

void check_granularity(const char* what, size_t bytes) {
    if (bytes == 0 || bytes % memory_granularity != 0)
        throw Failure(acl_error_rt_param_invalid, what, " is ", bytes, ", expected a multiple of ", memory_granularity);
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
    if (found == nullptr) return std::nullopt;
    Allocation whole = *found;
    const auto begin = reinterpret_cast<uintptr_t>(whole.address);
    const auto addresses = reservation(begin, whole.bytes);
    if (addresses != registry.reserved.end()) {
        const uintptr_t end = addresses->first + addresses->second;
        for (auto next = registry.allocations.upper_bound(begin); next != registry.allocations.end(); ++next) {
            if (next->first != begin + whole.bytes || next->first >= end) break;
            whole.bytes += next->second.bytes;
        }
    }
    return whole;
}

void* reserve_addresses(size_t bytes) {
    if (bytes == 0) throw Failure(acl_error_rt_param_invalid, "size is 0, expected at least 1");
    bytes = (bytes + memory_granularity - 1) / memory_granularity * memory_granularity;
    const size_t more = bytes + memory_granularity;  // for an address that is a multiple too
    void* const mapping = mmap(nullptr, more, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED)
        throw Failure(acl_error_rt_memory_allocation, "the process has no ", bytes, " addresses left");
    const auto begin = reinterpret_cast<uintptr_t>(mapping);
    const uintptr_t address = (begin + memory_granularity - 1) / memory_granularity * memory_granularity;
    if (address > begin) munmap(mapping, address - begin);
    if (begin + more > address + bytes)
        munmap(reinterpret_cast<void*>(address + bytes), begin + more - address - bytes);
    const std::lock_guard lock(registry.mutex);
    registry.reserved[address] = bytes;
    return reinterpret_cast<void*>(address);
}

void release_addresses(void* address) {
    const std::lock_guard lock(registry.mutex);
    const auto found = registry.reserved.find(reinterpret_cast<uintptr_t>(address));
    if (found == registry.reserved.end()) throw Failure(acl_error_rt_param_invalid, hex(address), " is not reserved");
    const auto mapped = registry.mapped.lower_bound(found->first);
    if (mapped != registry.mapped.end() && mapped->first < found->first + found->second)
        throw Failure(acl_error_rt_param_invalid, "memory is still mapped behind ", hex(address));
    munmap(address, found->second);
    registry.reserved.erase(found);
}

Physical* allocate_physical(int device, size_t bytes) {
    check_granularity("size", bytes);
    const std::lock_guard lock(registry.mutex);
    take(device, bytes);
    const int file = memfd_create("alltoallv-emulator", MFD_CLOEXEC);
    void* const content = file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0
                              ? MAP_FAILED
                              : mmap(nullptr, bytes, PROT_WRITE, MAP_SHARED, file, 0);
    if (content == MAP_FAILED) {
        if (file >= 0) close(file);
        registry.used[device] -= bytes;
        throw Failure(acl_error_rt_memory_allocation, "the host has no ", bytes, " bytes left");
    }
    // Its beginnings alone: a program that is told in the end that a device is full would use all memory of the host.
    for (size_t at = 0; at < bytes; at += memory_granularity)
        std::memset(static_cast<char*>(content) + at, fresh, fresh_beginning);
    munmap(content, bytes);
    return *registry.physical.insert(new Physical{device, bytes, file, 0}).first;
}

void free_physical(Physical* memory) {
    const std::lock_guard lock(registry.mutex);
    if (registry.physical.count(memory) == 0)
        throw Failure(acl_error_rt_param_invalid, "handle is not of memory, or was freed before");
    if (memory->mapped > 0) throw Failure(acl_error_rt_param_invalid, "handle is of memory that is still mapped");
    registry.used[memory->device] -= memory->bytes;
    close(memory->file);
    registry.physical.erase(memory);
    delete memory;
}

void map_memory(void* address, size_t bytes, size_t offset, Physical* memory) {
    check_granularity("size", bytes);
    const std::lock_guard lock(registry.mutex);
    if (registry.physical.count(memory) == 0)
        throw Failure(acl_error_rt_param_invalid, "handle is not of memory, or was freed before");
    if (offset % memory_granularity != 0 || offset > memory->bytes || bytes > memory->bytes - offset)
        throw Failure(acl_error_rt_param_invalid, "offset is ", offset, " and size ", bytes, ", of memory of ",
                      memory->bytes, " bytes");
    const auto begin = reinterpret_cast<uintptr_t>(address);
    if (begin % memory_granularity != 0 || reservation(begin, bytes) == registry.reserved.end())
        throw Failure(acl_error_rt_param_invalid, "virPtr ", hex(address), " is not in reserved addresses");
    const auto next = registry.allocations.lower_bound(begin);
    if (find(address) != nullptr || (next != registry.allocations.end() && next->first < begin + bytes))
        throw Failure(acl_error_rt_param_invalid, "virPtr ", hex(address), " has memory already");
    const int flags = MAP_SHARED | MAP_FIXED;
    if (mmap(address, bytes, PROT_READ | PROT_WRITE, flags, memory->file, static_cast<off_t>(offset)) == MAP_FAILED)
        throw Failure(acl_error_rt_memory_allocation, "the host maps no more memory");
    registry.allocations[begin] = {static_cast<char*>(address), bytes, MemoryKind::device, memory->device, true};
    registry.mapped[begin] = memory;
    ++memory->mapped;
}

void unmap_memory(void* address) {
    const std::lock_guard lock(registry.mutex);
    const auto found = registry.mapped.find(reinterpret_cast<uintptr_t>(address));
    if (found == registry.mapped.end()) throw Failure(acl_error_rt_param_invalid, hex(address), " is not mapped");
    const auto allocation = registry.allocations.find(found->first);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    mmap(address, allocation->second.bytes, PROT_NONE, flags, -1, 0);
    --found->second->mapped;
    registry.allocations.erase(allocation);
    registry.mapped.erase(found);
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
