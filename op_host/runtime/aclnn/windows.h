// The windows of a communicator: memory of every rank that the kernels of its peers can reach.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "op_kernel/ascendc/window.h"
#include "runtime/aclnn/call.h"

namespace alltoallv::aclnn {

/// Returns the highest of the ranks' numbers, once all have given theirs.
using Highest = std::function<uint32_t(uint32_t own)>;

/// What kernels are told of a group's windows, or nothing where this HCCL has no windows, or the group has more ranks
/// than a kernel serves: then the host's calls of HCCL serve. All ranks call it, and the first call for a group waits
/// for them: it makes a communicator of the same ranks, since HCCL's own collectives use the buffers of theirs. Throws
/// Refusal, on all ranks if on one: they agree by `highest` before each step in which HCCL waits for all, by default by
/// HCCL itself.
std::shared_ptr<const alltoallv_kernels::WindowTiling> windows_of(const Group& group, const Highest& highest = {});

/// Gives the memory and the communicator of a group's windows back, where it has some.
void forget_windows(const char* name);

}  // namespace alltoallv::aclnn
