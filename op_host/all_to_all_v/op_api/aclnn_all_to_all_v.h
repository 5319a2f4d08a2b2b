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
///   expects     true: recvCounts holds the rows that this rank expects; all ranks find out if others come
///   recvCounts  int64, [W]: filled with the rows from each rank, unless `expects`
///   status      int32, [lanes, 8], see aclnnAlltoallvGetWindows: filled with a code and whom it names: 0 done; the
///   same on all
///               ranks, with nothing written: 4 a rank receives more than its capacity, 5 negative counts or rows
///               outside of x, 6 rows of another size, 7 a rank receives other counts than it expects; 1 a rank is
///               late, 2 a peer has said so, 3 an earlier call has failed: then the group's windows are of no more use
///
/// One kernel, which reaches its peers through their windows: the host waits for nothing, and a captured graph can be
/// replayed with other counts. The first call for a group waits for all ranks. Where HCCL has no windows, or the group
/// has more than 64 ranks, the second call waits for the stream, reads the counts, and calls HcclAlltoAllV.
aclnnStatus aclnnAlltoallvAllToAllVGetWorkspaceSize(const aclTensor* x, const aclTensor* sendCounts,
                                                    const aclTensor* sdispls, const char* group, bool expects,
                                                    aclTensor* out, aclTensor* recvCounts, aclTensor* status,
                                                    uint64_t* workspaceSize, aclOpExecutor** executor);
aclnnStatus aclnnAlltoallvAllToAllV(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                    aclrtStream stream);

/// What decides whether the operators of this library reach their peers by kernels; the first call for a group waits
/// for all ranks. `lanes`: 0 where HCCL has no windows or the group has more than 64 ranks. `laneBytes`: what a lane
/// has for the data of a round, see AlltoallvQuantAllReduce.
aclnnStatus aclnnAlltoallvGetWindows(const char* group, uint32_t* lanes, uint64_t* laneBytes);

/// The same for callers whose ranks have another way to agree than HCCL, which a rank cannot use that has no memory
/// left: `highest` returns 0, and gives the highest of all ranks' `own` once all have called it. If a rank fails, all
/// get an error, and none waits for it in HCCL unless it failed there.
typedef int (*AlltoallvHighest)(void* context, uint32_t own, uint32_t* highest);
aclnnStatus aclnnAlltoallvMakeWindows(const char* group, AlltoallvHighest highest, void* context, uint32_t* lanes,
                                      uint64_t* laneBytes);

/// Gives back what the operators of this library keep for a group: a communicator and its windows. All ranks call it
/// when no call of theirs is running, before or after they destroy the communicator.
aclnnStatus aclnnAlltoallvReleaseGroup(const char* group);

}  // extern "C"
#pragma GCC visibility pop
