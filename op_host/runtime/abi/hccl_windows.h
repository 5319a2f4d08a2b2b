// The part of HCCL's C ABI with which kernels find the buffers of a communicator: its windows. All are looked up by
// name, since no public header has them all.
#pragma once

#include "runtime/abi/hccl.h"

#pragma GCC visibility push(default)
extern "C" {

/// Finds a communicator of this process.
HcclResult HcclCommGetHandleWithName(const char* commName, HcclComm* comm);

/// This rank's window: twice HCCL_BUFFSIZE in device memory.
HcclResult HcclGetHcclBuffer(HcclComm comm, void** buffer, uint64_t* size);

/// A peer's window, mapped into this process, once HcclCreateOpResCtx has made the links.
HcclResult HcclGetRemoteIpcHcclBuf(HcclComm comm, uint64_t remoteRank, void** buffer, uint64_t* size);

/// The options of HcclCreateOpResCtx.
HcclResult HcclKfcAllocOpArgs(void** opArgs);
HcclResult HcclKfcFreeOpArgs(void* opArgs);
HcclResult HcclKfcOpArgsSetCommEngine(void* opArgs, uint8_t engine);
HcclResult HcclKfcOpArgsSetAlgConfig(void* opArgs, char* algConfig);

/// All ranks call it: makes links to the peers' windows.
HcclResult HcclCreateOpResCtx(HcclComm comm, uint8_t opType, void* opArgs, void** opResCtx);

}  // extern "C"
#pragma GCC visibility pop

/// What the kernels that communicate need of HCCL, beside what every release has.
#define ALLTOALLV_WINDOW_CALLS(X) \
    X(HcclCreateSubCommConfig)    \
    X(HcclGetHcclBuffer)          \
    X(HcclGetRemoteIpcHcclBuf)    \
    X(HcclKfcAllocOpArgs)         \
    X(HcclKfcFreeOpArgs)          \
    X(HcclKfcOpArgsSetCommEngine) \
    X(HcclCreateOpResCtx)
