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
    bool registered;  // the caller's host memory, or known and not allocated here
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

/// Returns the allocation that holds the address.
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
