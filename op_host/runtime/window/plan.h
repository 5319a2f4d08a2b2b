// How a kernel that communicates divides its work: plain numbers, the same on every rank of a communicator.
#pragma once

#include <cstdint>

#include "op_kernel/ascendc/window.h"

namespace alltoallv {

/// Lanes, bytes and the limit of a wait, fixed when a communicator's windows are made, never by a call: peers may be at
/// another call, and a place that moved with a call's size would be overwritten while one still reads. This rank and
/// the addresses are left to the caller.
///
/// `window_bytes` and `cores` are the smallest of all ranks. Throws Error (invalid_param) if the ranks are more than
/// the kernels know, or the windows too small; the message says the HCCL_BUFFSIZE that serves.
alltoallv_kernels::WindowTiling plan_window(uint64_t window_bytes, uint32_t ranks, uint32_t cores);

/// Returns in how many rounds a lane moves the largest block of a call of all_to_all_v. A block's bytes are divided
/// among the lanes, and a lane's half among the peers.
uint64_t rounds_of(const alltoallv_kernels::WindowTiling& plan, uint64_t rows, uint64_t row_bytes);

}  // namespace alltoallv
