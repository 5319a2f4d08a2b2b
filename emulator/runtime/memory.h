// Memory of the emulated devices, and pinned host memory: host memory with known bounds.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace alltoallv::emulator {

enum class MemoryKind { device, host };

struct Allocation {
    char* address;
    size_t bytes;
    MemoryKind kind;
    int device;       // for device memory
    bool registered;  // the caller's host memory, mapped, or known and not allocated here
};

/// Fresh device memory is filled with 0xA5, so that missing initialization is noticed. Throws Failure if the device is
/// full.
void* allocate(MemoryKind kind, int device, size_t bytes);
void register_host(void* address, size_t bytes);

/// Throws Failure for an address that `allocate` or `register_host` has not returned.
void free_memory(MemoryKind kind, void* address);
void unregister_host(void* address);

/// Device memory that something else has mapped here and accounts for, until it is forgotten.
void know_device_memory(void* address, size_t bytes, int device);
void forget_device_memory(void* address);

/// Virtual memory: reserved addresses, at which memory of a device is mapped and unmapped. Its sizes are multiples of
/// `memory_granularity`, up to which reservations are rounded. Throws Failure for what has not been reserved, allocated
/// or mapped, or is still in use.
constexpr size_t memory_granularity = size_t{2} << 20;
struct Physical;
void* reserve_addresses(size_t bytes);
void release_addresses(void* address);
Physical* allocate_physical(int device, size_t bytes);
void free_physical(Physical* memory);
void map_memory(void* address, size_t bytes, size_t offset, Physical* memory);
void unmap_memory(void* address);

/// Returns the allocation that holds the address; of mapped memory, with what is mapped right behind it.
std::optional<Allocation> find_allocation(const void* address);

/// Throws Failure unless the range lies in one allocation of device memory. `what` names the argument.
void check_device_range(const char* what, const void* address, size_t bytes);

/// Throws Failure if the range begins in device memory, or exceeds the pinned allocation in which it begins.
void check_host_range(const char* what, const void* address, size_t bytes);

/// Device memory that is counted as used and never touched, so it costs the host nothing.
class Reserved {
  public:
    /// Throws Failure if the device is full.
    Reserved(int device, size_t bytes);
    ~Reserved();
    Reserved(const Reserved&) = delete;
    Reserved& operator=(const Reserved&) = delete;

  private:
    int device_;
    size_t bytes_;
};

struct Usage {
    size_t free, total;
};
Usage memory_usage(int device);

}  // namespace alltoallv::emulator
