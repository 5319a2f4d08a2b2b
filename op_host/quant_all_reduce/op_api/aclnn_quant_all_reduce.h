// aclnn's form of the quantized all-reduce and of its two halves, in C.
//
// Each operator is two calls. `...GetWorkspaceSize` checks all arguments and touches neither stream nor data; it gives
// the bytes of workspace, which the caller allocates on the device, and an executor, which the second call uses up.
// Status: 0; 161001 a null parameter; 161002 an invalid one; 361001 ACL or HCCL has failed; 561000 any other failure.
// Tensors are contiguous. The bits equal alltoallv.testing.quantized.
#pragma once

#include "runtime/abi/aclnn.h"

#pragma GCC visibility push(default)
extern "C" {

/// Symmetric absmax codes per group of `groupSize` elements of the flattened x.
///   x       float32, float16 or bfloat16, any shape, n elements
///   bits    of a code: 8, or 4, of which two share a byte, the even one in its low half
///   codes   int8 or uint8, a byte per element; with 4 bits half of that, and every group begins at a byte
///   scales  float32, one per group: ceil(n / groupSize)
aclnnStatus aclnnAlltoallvQuantizeGetWorkspaceSize(const aclTensor* x, int64_t bits, int64_t groupSize,
                                                   aclTensor* codes, aclTensor* scales, uint64_t* workspaceSize,
                                                   aclOpExecutor** executor);
aclnnStatus aclnnAlltoallvQuantize(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                   aclrtStream stream);

/// Sums W records in float32 in their order, and rounds once; values that do not fit saturate.
///   codes   int8 or uint8, [W, bytes of the codes of n elements]
///   scales  float32, [W, ceil(n / groupSize)]
///   out     float32, float16 or bfloat16, n elements
aclnnStatus aclnnAlltoallvDequantizeSumGetWorkspaceSize(const aclTensor* codes, const aclTensor* scales, int64_t bits,
                                                        int64_t groupSize, aclTensor* out, uint64_t* workspaceSize,
                                                        aclOpExecutor** executor);
aclnnStatus aclnnAlltoallvDequantizeSum(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                        aclrtStream stream);

/// Sums the values of W ranks, which share scale and offset: (sum of x + W * offset) * scale, exact but for one
/// rounding of each step in float32, and one to the type of out; values that do not fit saturate.
///   x       int8, [W, n]
///   scale   float32, float16 or bfloat16, [m]: the scale of element i is scale[i % m]
///   offset  the type of scale, [1]
///   out     float32, float16 or bfloat16, n elements
aclnnStatus aclnnAlltoallvSharedScaleSumGetWorkspaceSize(const aclTensor* x, const aclTensor* scale,
                                                         const aclTensor* offset, aclTensor* out,
                                                         uint64_t* workspaceSize, aclOpExecutor** executor);
aclnnStatus aclnnAlltoallvSharedScaleSum(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                         aclrtStream stream);

/// Sums x over the ranks of a group: all-to-all of codes, sum in the order of the ranks, dequantize, all-gather. All
/// ranks call it with the same n, options and type of out, and all get the same bits.
///   x          float32, float16 or bfloat16, n elements; int8 with a scale
///   scale      null, or as in aclnnAlltoallvSharedScaleSum, the same on all ranks
///   offset     null, or as there, added to every rank's x; both or neither
///   group      the name of a communicator of HCCL, at most 127 bytes
///   groupSize  elements with a scale of their own, without `scale`
///   bits       of a code, 8 or 4; 8 with a scale
///   average    divides the sum by the number of ranks, without `scale`
///   saturate   values that do not fit become the largest that do, else inf
///   out        float32, float16 or bfloat16, n elements; may be x, if the types agree
///   status     null, or int32, [lanes, 8]: as in aclnnAlltoallvAllToAllV, 0 to 3
/// One kernel, which reaches its peers through their windows; the first call for a group waits for all ranks. Where
/// HCCL has no windows, the group has more than 64 ranks, or a group of elements is larger than a window, kernels and
/// HCCL's calls in turn. On the emulator a rank that does not come makes the stream fail.
aclnnStatus aclnnAlltoallvQuantAllReduceGetWorkspaceSize(const aclTensor* x, const aclTensor* scale,
                                                         const aclTensor* offset, const char* group, int64_t bits,
                                                         int64_t groupSize, bool average, bool saturate, aclTensor* out,
                                                         aclTensor* status, uint64_t* workspaceSize,
                                                         aclOpExecutor** executor);
aclnnStatus aclnnAlltoallvQuantAllReduce(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                         aclrtStream stream);

}  // extern "C"
#pragma GCC visibility pop
