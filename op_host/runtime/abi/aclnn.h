// The part of aclnn's C ABI that our operators and their callers use: tensors, executors, and numbers of errors.
//
// Declarations of our own, from facts about the interface. On a device libnnopbase.so has these functions, on the
// emulator a library of the same name. No wheel ships their header, so nothing compares the declarations.
#pragma once

#include "runtime/abi/acl.h"

using aclnnStatus = int32_t;

inline constexpr aclnnStatus aclnn_err_param_nullptr = 161001;
inline constexpr aclnnStatus aclnn_err_param_invalid = 161002;
inline constexpr aclnnStatus aclnn_err_runtime_error = 361001;
inline constexpr aclnnStatus aclnn_err_inner = 561000;

struct aclTensor;
struct aclOpExecutor;

#pragma GCC visibility push(default)
extern "C" {

/// Strides and offset are in elements. `tensorData` is the start of the storage, which the caller owns.
aclTensor* aclCreateTensor(const int64_t* viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t* stride,
                           int64_t offset, aclFormat format, const int64_t* storageDims, uint64_t storageDimsNum,
                           void* tensorData);
aclnnStatus aclDestroyTensor(const aclTensor* tensor);

/// The caller frees the arrays by delete[].
aclnnStatus aclGetViewShape(const aclTensor* tensor, int64_t** viewDims, uint64_t* viewDimsNum);
aclnnStatus aclGetViewStrides(const aclTensor* tensor, int64_t** stridesValue, uint64_t* stridesNum);
aclnnStatus aclGetViewOffset(const aclTensor* tensor, int64_t* offset);
aclnnStatus aclGetDataType(const aclTensor* tensor, aclDataType* dataType);
aclnnStatus aclGetFormat(const aclTensor* tensor, aclFormat* format);
aclnnStatus aclGetRawTensorAddr(const aclTensor* tensor, void** addr);

/// The executor serves any number of second calls, until it is destroyed.
aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor);
aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor);

}  // extern "C"
#pragma GCC visibility pop
