// aclnn's form of all-to-all-v with counts in device memory, in C. Two calls and numbers of status:
// quant_all_reduce/op_api/aclnn_quant_all_reduce.h.
#pragma once

#include "runtime/abi/aclnn.h"

#pragma GCC visibility push(default)
extern "C" {

/// Rank r receives the rows that every rank j has for it, packed in the order of the ranks, at the start of `out`.
///   x           any type, [rows, ...]
///   sendCounts  int64, [W]: rows for each rank, 0 or more
///   sdispls     int64, [W]: the first row for each rank; null: packed in the order of the ranks
///   group       the name of a communicator of HCCL, at most 127 bytes
///   out         the type of x, [capacity, ...]; rows behind the received ones keep their values
///   recvCounts  int64, [W]: filled with the rows from each rank
///   status      int32, [lanes, 8]: filled; per lane 0 and then whom it names, or the same failure on all ranks: 4 a
///   rank
///               receives more than its capacity, 5 negative counts or rows outside of x, 6 rows of other sizes. Then
///               nothing is written but status and recvCounts.
///
/// Until the kernel of op_kernel/ascendc serves it, the host does: the second call waits for the stream twice, reads
/// the counts, and calls HcclAlltoAllV. So it cannot be captured in a graph yet.
aclnnStatus aclnnAlltoallvAllToAllVGetWorkspaceSize(const aclTensor* x, const aclTensor* sendCounts,
                                                    const aclTensor* sdispls, const char* group, aclTensor* out,
                                                    aclTensor* recvCounts, aclTensor* status, uint64_t* workspaceSize,
                                                    aclOpExecutor** executor);
aclnnStatus aclnnAlltoallvAllToAllV(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                    aclrtStream stream);

}  // extern "C"
#pragma GCC visibility pop
