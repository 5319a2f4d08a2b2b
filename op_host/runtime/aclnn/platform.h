// What differs between a device and the emulator: how messages reach the user, and how kernels start.
#pragma once

#include <string>
#include <vector>

#include "runtime/abi/aclnn.h"

namespace alltoallv::aclnn {

/// Keeps or prints the message of a call that is refused or fails; returns `status`.
aclnnStatus report(const char* function, aclnnStatus status, const std::string& message);

/// Cores of kernels that work alone, at most.
uint32_t vector_cores();
/// Cores of a kernel that communicates: the same on all ranks.
uint32_t lanes();

/// What a kernel needs of the caller's workspace: device memory for its tiling.
inline constexpr uint64_t tiling_bytes = 1024;

/// Device memory that a kernel reads or writes; null and empty where it is left out.
struct Argument {
    const char* name;  ///< for messages
    const void* address;
    uint64_t bytes;
};

/// Enqueues a kernel of op_kernel/ascendc, by the name of its function, on so many cores. `numbers` are copied to
/// `tiling`, which is the last of its arguments.
void launch(const char* kernel, uint32_t cores, const std::vector<Argument>& arguments, const void* numbers,
            size_t bytes, void* tiling, aclrtStream stream);

template <class Tiling>
void launch(const char* kernel, uint32_t cores, const std::vector<Argument>& arguments, const Tiling& numbers,
            void* tiling, aclrtStream stream) {
    static_assert(sizeof numbers <= tiling_bytes);
    launch(kernel, cores, arguments, &numbers, sizeof numbers, tiling, stream);
}

/// Enqueues a look at the status that a communicating kernel leaves: where a stream can be made to fail by what it
/// finds, it fails.
void check_status(const char* kernel, const void* status, aclrtStream stream);

}  // namespace alltoallv::aclnn
