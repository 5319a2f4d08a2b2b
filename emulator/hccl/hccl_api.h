// The HCCL functions beyond abi/hccl.h that the emulator implements, for programs such as torch_npu.
#pragma once

#include "acl/acl_api.h"
#include "runtime/abi/hccl.h"

enum HcclCommConfigCapability : int { HCCL_COMM_CONFIG_RESERVED = 12 };
enum HcclConfig : int { HCCL_DETERMINISTIC = 0 };

union HcclConfigValue {
    int32_t value;
};

enum HcclSendRecvType { HCCL_SEND = 0, HCCL_RECV = 1 };

struct HcclSendRecvItem {
    HcclSendRecvType sendRecvType;
    void* buf;
    uint64_t count;
    HcclDataType dataType;
    uint32_t remoteRank;
};

#pragma GCC visibility push(default)
extern "C" {

// --- communicators ---
HcclResult HcclCommInitAll(uint32_t ndev, int32_t* devices, HcclComm* comms);
uint32_t HcclGetCommConfigCapability();
HcclResult HcclSetConfig(HcclConfig config, HcclConfigValue configValue);
HcclResult HcclGetConfig(HcclConfig config, HcclConfigValue* configValue);

// --- data movement ---
HcclResult HcclAlltoAll(const void* sendBuf, uint64_t sendCount, HcclDataType sendType, const void* recvBuf,
                        uint64_t recvCount, HcclDataType recvType, HcclComm comm, aclrtStream stream);
HcclResult HcclAlltoAllVC(const void* sendBuf, const void* sendCountMatrix, HcclDataType sendType, const void* recvBuf,
                          HcclDataType recvType, HcclComm comm, aclrtStream stream);
HcclResult HcclAllGatherV(void* sendBuf, uint64_t sendCount, void* recvBuf, const void* recvCounts,
                          const void* recvDispls, HcclDataType dataType, HcclComm comm, aclrtStream stream);
HcclResult HcclBroadcast(void* buf, uint64_t count, HcclDataType dataType, uint32_t root, HcclComm comm,
                         aclrtStream stream);
HcclResult HcclScatter(void* sendBuf, void* recvBuf, uint64_t recvCount, HcclDataType dataType, uint32_t root,
                       HcclComm comm, aclrtStream stream);

/// Like HcclAlltoAllV, but for bytes in host memory, packed in the order of the ranks, and done when it returns.
HcclResult AlltoallvEmulatorExchange(const void* input, const uint64_t* sends, const void* output,
                                     const uint64_t* recvs, HcclComm comm);

// --- reductions ---
HcclResult HcclReduce(void* sendBuf, void* recvBuf, uint64_t count, HcclDataType dataType, HcclReduceOp op,
                      uint32_t root, HcclComm comm, aclrtStream stream);
HcclResult HcclReduceScatterV(void* sendBuf, const void* sendCounts, const void* sendDispls, void* recvBuf,
                              uint64_t recvCount, HcclDataType dataType, HcclReduceOp op, HcclComm comm,
                              aclrtStream stream);

// --- point to point ---
HcclResult HcclSend(void* sendBuf, uint64_t count, HcclDataType dataType, uint32_t destRank, HcclComm comm,
                    aclrtStream stream);
HcclResult HcclRecv(void* recvBuf, uint64_t count, HcclDataType dataType, uint32_t srcRank, HcclComm comm,
                    aclrtStream stream);
HcclResult HcclBatchSendRecv(HcclSendRecvItem* sendRecvInfo, uint32_t itemNum, HcclComm comm, aclrtStream stream);
HcclResult HcclGroupStart();
HcclResult HcclGroupEnd();

}  // extern "C"
#pragma GCC visibility pop
