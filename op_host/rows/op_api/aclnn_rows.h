// aclnn's form of moving rows by indices, in C. Two calls and numbers of status:
// quant_all_reduce/op_api/aclnn_quant_all_reduce.h.
#pragma once

#include "runtime/abi/aclnn.h"

#pragma GCC visibility push(default)
extern "C" {

/// out[i] = x[index[i]]; a row whose index is outside of x keeps what `out` holds.
///   x      any type, [rows, ...]
///   index  int32, [n]
///   out    the type of x, [n, ...], rows shaped as x's
aclnnStatus aclnnAlltoallvGatherRowsGetWorkspaceSize(const aclTensor* x, const aclTensor* index, aclTensor* out,
                                                     uint64_t* workspaceSize, aclOpExecutor** executor);
aclnnStatus aclnnAlltoallvGatherRows(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                     aclrtStream stream);

/// out[index[i]] = x[i]; a row whose index is outside of `out` is left out, and rows of `out` that no index names keep
/// what they hold.
///   x      any type, [n, ...]
///   index  int32, [n]; those inside of `out` differ from each other
///   out    the type of x, [rows, ...], rows shaped as x's
aclnnStatus aclnnAlltoallvScatterRowsGetWorkspaceSize(const aclTensor* x, const aclTensor* index, aclTensor* out,
                                                      uint64_t* workspaceSize, aclOpExecutor** executor);
aclnnStatus aclnnAlltoallvScatterRows(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                      aclrtStream stream);

}  // extern "C"
#pragma GCC visibility pop
