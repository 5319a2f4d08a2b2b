// What differs between a device and the emulator: how messages reach the user, and how kernels start.
#pragma once

#include <string>

#include "op_kernel/ascendc/all_to_all_v_tiling.h"
#include "op_kernel/ascendc/quantized_tiling.h"
#include "runtime/abi/aclnn.h"

namespace alltoallv::aclnn {

/// Keeps or prints the message of a call that is refused or fails; returns `status`.
aclnnStatus report(const char* function, aclnnStatus status, const std::string& message);

/// What a kernel needs of the caller's workspace: device memory for its tiling.
inline constexpr uint64_t tiling_bytes = 1024;

/// Enqueues: int8 codes and float32 scales of `count` elements in groups, as op_kernel/cpu/quantize.h says.
void quantize(aclDataType dtype, const void* x, int64_t count, int64_t group_size, void* codes, void* scales,
              void* tiling, aclrtStream stream);

/// Enqueues: sum of `ranks` records of codes and of scales, which follow each other, in the order of the ranks, with
/// one rounding to `dtype`; values that do not fit become the largest that do.
void dequantize_sum(const void* codes, const void* scales, int64_t ranks, int64_t count, int64_t group_size,
                    aclDataType dtype, void* out, void* tiling, aclrtStream stream);

/// Cores of a kernel that communicates: the same on all ranks.
uint32_t lanes();

/// Enqueues: all_to_all_v with counts in device memory, through the windows that `numbers` names. `sdispls` may be
/// null.
void all_to_all_v(const alltoallv_kernels::AllToAllVTiling& numbers, const void* x, const void* send_counts,
                  const void* sdispls, void* out, void* recv_counts, void* status, void* tiling, aclrtStream stream);

/// Enqueues: the quantized all-reduce, and where a stream can be made to fail a look at the status that it leaves.
/// `scale` and `offset` are null where `numbers` has a group.
void quant_all_reduce(const alltoallv_kernels::QuantAllReduceTiling& numbers, const void* x, const void* scale,
                      const void* offset, void* out, void* status, void* tiling, aclrtStream stream);

}  // namespace alltoallv::aclnn
