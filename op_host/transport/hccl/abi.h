/// \file abi.h
/// \brief The part of the C interfaces of HCCL and ACL that the transport uses, declared anew: no CANN is needed to
/// build. tests/npu compares every value, size, offset and signature with the headers in torch_npu's wheel.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace alltoallv::abi {

using AclError = int;        ///< 0: success
using HcclResult = int32_t;  ///< 0: success; an enum in the headers
using Stream = void*;
using Event = void*;
using Context = void*;
using Comm = void*;

/// Names of HcclResult 0 to 24.
inline constexpr std::array<std::string_view, 25> hccl_result_names{
    "HCCL_SUCCESS",
    "HCCL_E_PARA",
    "HCCL_E_PTR",
    "HCCL_E_MEMORY",
    "HCCL_E_INTERNAL",
    "HCCL_E_NOT_SUPPORT",
    "HCCL_E_NOT_FOUND",
    "HCCL_E_UNAVAIL",
    "HCCL_E_SYSCALL",
    "HCCL_E_TIMEOUT",
    "HCCL_E_OPEN_FILE_FAILURE",
    "HCCL_E_TCP_CONNECT",
    "HCCL_E_ROCE_CONNECT",
    "HCCL_E_TCP_TRANSFER",
    "HCCL_E_ROCE_TRANSFER",
    "HCCL_E_RUNTIME",
    "HCCL_E_DRV",
    "HCCL_E_PROFILING",
    "HCCL_E_CCE",
    "HCCL_E_NETWORK",
    "HCCL_E_AGAIN",
    "HCCL_E_REMOTE",
    "HCCL_E_SUSPENDING",
    "HCCL_E_OPRETRY_FAIL",
    "HCCL_E_OOM",
};

inline constexpr HcclResult hccl_success = 0, hccl_e_para = 1, hccl_e_memory = 3, hccl_e_unavail = 7,
                            hccl_e_timeout = 9, hccl_e_tcp_connect = 11, hccl_e_again = 20, hccl_e_remote = 21,
                            hccl_e_oom = 24;

/// HcclDataType.
enum class DataType : int32_t {
    int8 = 0,
    int16 = 1,
    int32 = 2,
    fp16 = 3,
    fp32 = 4,
    int64 = 5,
    uint64 = 6,
    uint8 = 7,
    uint16 = 8,
    uint32 = 9,
    fp64 = 10,
    bfp16 = 11,
};

/// HcclReduceOp.
enum class Reduce : int32_t { sum = 0, prod = 1, max = 2, min = 3 };

inline constexpr size_t root_info_bytes = 4108;
inline constexpr size_t comm_name_bytes = 128;  ///< with the terminating zero

struct RootInfo {
    char internal[root_info_bytes];
};

/// HcclCommConfig, with the values by which HCCL knows what is left to its defaults.
struct CommConfig {
    uint64_t size = sizeof(CommConfig);
    uint32_t magic = 0xf0f0f0f0;
    uint32_t version = 10;
    uint64_t reserved = 0;
    uint32_t buffer_mb = 0xffffffff;
    uint32_t deterministic = 0xffffffff;
    char name[comm_name_bytes] = {};
    char udi[128] = {};
    uint32_t op_expansion_mode = 0;
    uint32_t rdma_traffic_class = 0xffffffff;
    uint32_t rdma_service_level = 0xffffffff;
    uint32_t world_rank = 0;
    uint64_t job = 0;
    uint8_t graph_zero_copy = 0;
    int32_t exec_timeout = -1;
    char algorithm[1600] = {};
    char retry_enable[50] = {};
    char retry_params[128] = {};
    char buffer_name[128] = {};
    uint32_t qos = 0xffffffff;
    uint64_t symmetric_memory_stride = 16;
};
static_assert(sizeof(CommConfig) == 2240);

inline constexpr AclError acl_uninitialized = 100001, acl_repeat_initialize = 100002, acl_stream_sync_timeout = 507046;
inline constexpr int memcpy_host_to_device = 1, memcpy_device_to_host = 2, memcpy_device_to_device = 3;
inline constexpr int malloc_huge_first = 0, event_complete = 1;

/// HcclAlltoAllV reads counts and displacements as uint64; up to this many elements for a rank.
inline constexpr int64_t max_count = 0x7FFFFFFFF;

}  // namespace alltoallv::abi
