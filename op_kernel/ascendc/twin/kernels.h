// Runs this package's kernels on the twin.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "op_kernel/ascendc/twin/core.h"

namespace alltoallv::twin {

/// Runs the kernel of that name on `cores` cores of this process; `arguments` are addresses of device memory, null
/// where an optional one is left out. Throws Fault, also for an unknown name or another number of arguments.
void run_kernel(const std::string& name, uint32_t cores, std::span<void* const> arguments, const Behaviour& behaviour);

}  // namespace alltoallv::twin

extern "C" {

/// The same for tests: returns 0, or 1 with "kind: text" of the first fault in `fault`.
__attribute__((visibility("default"))) int alltoallv_twin_run(const char* name, unsigned cores, void* const* arguments,
                                                              size_t count, unsigned long long seed,
                                                              double mean_delay_us, char* fault, size_t fault_bytes);
}
