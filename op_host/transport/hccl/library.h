/// \file library.h
/// \brief libhccl and libascendcl, opened at run time.
#pragma once

#include "transport/hccl/abi.h"

namespace alltoallv {

/// Every function that the transport calls: library, name, result, arguments. Those of the second list may be absent
/// in older releases; their pointers are then null.
#define ALLTOALLV_CANN_REQUIRED(X)                                                                                   \
    X(ascendcl, aclInit, abi::AclError, (const char* config))                                                        \
    X(ascendcl, aclrtGetDevice, abi::AclError, (int32_t* device))                                                    \
    X(ascendcl, aclrtSetDevice, abi::AclError, (int32_t device))                                                     \
    X(ascendcl, aclrtGetDeviceCount, abi::AclError, (uint32_t* count))                                               \
    X(ascendcl, aclrtGetSocName, const char*, ())                                                                    \
    X(ascendcl, aclrtGetCurrentContext, abi::AclError, (abi::Context * context))                                     \
    X(ascendcl, aclrtSetCurrentContext, abi::AclError, (abi::Context context))                                       \
    X(ascendcl, aclrtCreateStream, abi::AclError, (abi::Stream * stream))                                            \
    X(ascendcl, aclrtDestroyStream, abi::AclError, (abi::Stream stream))                                             \
    X(ascendcl, aclrtSynchronizeStreamWithTimeout, abi::AclError, (abi::Stream stream, int32_t milliseconds))        \
    X(ascendcl, aclrtCreateEvent, abi::AclError, (abi::Event * event))                                               \
    X(ascendcl, aclrtDestroyEvent, abi::AclError, (abi::Event event))                                                \
    X(ascendcl, aclrtRecordEvent, abi::AclError, (abi::Event event, abi::Stream stream))                             \
    X(ascendcl, aclrtQueryEventStatus, abi::AclError, (abi::Event event, int* status))                               \
    X(ascendcl, aclrtMalloc, abi::AclError, (void** memory, size_t bytes, int policy))                               \
    X(ascendcl, aclrtFree, abi::AclError, (void* memory))                                                            \
    X(ascendcl, aclrtMemcpy, abi::AclError, (void* to, size_t capacity, const void* from, size_t bytes, int kind))   \
    X(ascendcl, aclrtMemcpyAsync, abi::AclError,                                                                     \
      (void* to, size_t capacity, const void* from, size_t bytes, int kind, abi::Stream stream))                     \
    X(hccl, HcclGetRootInfo, abi::HcclResult, (abi::RootInfo * info))                                                \
    X(hccl, HcclCommInitRootInfo, abi::HcclResult,                                                                   \
      (uint32_t size, const abi::RootInfo* info, uint32_t rank, abi::Comm* comm))                                    \
    X(hccl, HcclCommInitClusterInfo, abi::HcclResult, (const char* table, uint32_t rank, abi::Comm* comm))           \
    X(hccl, HcclCommDestroy, abi::HcclResult, (abi::Comm comm))                                                      \
    X(hccl, HcclGetRankSize, abi::HcclResult, (abi::Comm comm, uint32_t* size))                                      \
    X(hccl, HcclGetRankId, abi::HcclResult, (abi::Comm comm, uint32_t* rank))                                        \
    X(hccl, HcclGetErrorString, const char*, (abi::HcclResult result))                                               \
    X(hccl, HcclAlltoAllV, abi::HcclResult,                                                                          \
      (const void* input, const void* send_counts, const void* sdispls, abi::DataType send_type, const void* output, \
       const void* recv_counts, const void* rdispls, abi::DataType recv_type, abi::Comm comm, abi::Stream stream))   \
    X(hccl, HcclAllGather, abi::HcclResult,                                                                          \
      (void* input, void* output, uint64_t count, abi::DataType type, abi::Comm comm, abi::Stream stream))           \
    X(hccl, HcclAllReduce, abi::HcclResult,                                                                          \
      (void* input, void* output, uint64_t count, abi::DataType type, abi::Reduce op, abi::Comm comm,                \
       abi::Stream stream))                                                                                          \
    X(hccl, HcclReduceScatter, abi::HcclResult,                                                                      \
      (void* input, void* output, uint64_t count, abi::DataType type, abi::Reduce op, abi::Comm comm,                \
       abi::Stream stream))

#define ALLTOALLV_CANN_OPTIONAL(X)                                                                               \
    X(ascendcl, aclGetRecentErrMsg, const char*, ())                                                             \
    X(hccl, HcclGetCommAsyncError, abi::HcclResult, (abi::Comm comm, abi::HcclResult * error))                   \
    X(hccl, HcclCommInitRootInfoConfig, abi::HcclResult,                                                         \
      (uint32_t size, const abi::RootInfo* info, uint32_t rank, const abi::CommConfig* config, abi::Comm* comm)) \
    X(hccl, HcclCommInitClusterInfoConfig, abi::HcclResult,                                                      \
      (const char* table, uint32_t rank, abi::CommConfig* config, abi::Comm* comm))

struct HcclLibrary {
#define ALLTOALLV_MEMBER(library, name, result, arguments) result(*name) arguments = nullptr;
    ALLTOALLV_CANN_REQUIRED(ALLTOALLV_MEMBER)
    ALLTOALLV_CANN_OPTIONAL(ALLTOALLV_MEMBER)
#undef ALLTOALLV_MEMBER
};

/// Opened at the first call; stays open. Throws backend_unavailable naming the library or the symbol that is missing,
/// and what to do; a later call tries again.
const HcclLibrary& cann();

}  // namespace alltoallv
