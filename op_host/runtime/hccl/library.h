// libhccl, libhcomm and libascendcl, opened at run time.
#pragma once

#include "runtime/abi/hccl.h"

/// Every function that the transport calls, with its library (libhccl.so stands for libhcomm.so as well). Older
/// releases may lack the functions of the second list, whose pointers are then null.
#define ALLTOALLV_CANN_REQUIRED(X)                 \
    X(ascendcl, aclInit)                           \
    X(ascendcl, aclrtGetDevice)                    \
    X(ascendcl, aclrtSetDevice)                    \
    X(ascendcl, aclrtGetDeviceCount)               \
    X(ascendcl, aclrtGetSocName)                   \
    X(ascendcl, aclrtGetCurrentContext)            \
    X(ascendcl, aclrtSetCurrentContext)            \
    X(ascendcl, aclrtCreateStream)                 \
    X(ascendcl, aclrtDestroyStream)                \
    X(ascendcl, aclrtSynchronizeStreamWithTimeout) \
    X(ascendcl, aclrtSynchronizeDevice)            \
    X(ascendcl, aclrtCreateEvent)                  \
    X(ascendcl, aclrtDestroyEvent)                 \
    X(ascendcl, aclrtRecordEvent)                  \
    X(ascendcl, aclrtQueryEventStatus)             \
    X(ascendcl, aclrtStreamWaitEvent)              \
    X(ascendcl, aclrtMalloc)                       \
    X(ascendcl, aclrtFree)                         \
    X(ascendcl, aclrtMemcpy)                       \
    X(ascendcl, aclrtMemcpyAsync)                  \
    X(hccl, HcclGetRootInfo)                       \
    X(hccl, HcclCommInitRootInfo)                  \
    X(hccl, HcclCommInitClusterInfo)               \
    X(hccl, HcclCommDestroy)                       \
    X(hccl, HcclGetRankSize)                       \
    X(hccl, HcclGetCommName)                       \
    X(hccl, HcclGetRankId)                         \
    X(hccl, HcclGetErrorString)                    \
    X(hccl, HcclAlltoAllV)                         \
    X(hccl, HcclAllGather)                         \
    X(hccl, HcclAllReduce)                         \
    X(hccl, HcclReduceScatter)

#define ALLTOALLV_CANN_OPTIONAL(X)                 \
    X(ascendcl, aclGetRecentErrMsg)                \
    X(ascendcl, aclrtSynchronizeDeviceWithTimeout) \
    X(hccl, HcclGetCommAsyncError)                 \
    X(hccl, HcclCommInitRootInfoConfig)            \
    X(hccl, HcclCommInitClusterInfoConfig)

namespace alltoallv {

struct HcclLibrary {
#define ALLTOALLV_MEMBER(library, name) decltype(&::name) name = nullptr;
    ALLTOALLV_CANN_REQUIRED(ALLTOALLV_MEMBER)
    ALLTOALLV_CANN_OPTIONAL(ALLTOALLV_MEMBER)
#undef ALLTOALLV_MEMBER
};

/// Opens the libraries at the first call; they stay open. Throws backend_unavailable with the missing library or symbol
/// and with advice; a later call tries again.
const HcclLibrary& cann();

}  // namespace alltoallv
