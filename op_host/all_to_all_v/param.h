// Parameters of the ATB-shaped AllToAllV operator.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace alltoallv {

/// Says if the ranks are processes or threads of one process.
enum class CommMode : int { UNDEFINED = -1, MULTI_PROCESS = 0, MULTI_THREAD = 1 };

/// ATB's fields, in ATB's order and with ATB's defaults. Nothing is checked before `check_create` (checks.h).
struct AllToAllVParam {
    int rank = 0;
    int rank_size = 0;
    int rank_root = 0;
    /// One entry per rank, in elements.
    std::vector<int64_t> send_counts;
    std::vector<int64_t> sdispls;
    std::vector<int64_t> recv_counts;
    std::vector<int64_t> rdispls;
    /// "hccl" (the native transport of the tensors' device) or the name of one of our transports.
    std::string backend = "hccl";
    /// An HcclComm that the caller owns; when set, rank, rank_size and rank_root are not range-checked.
    void* hccl_comm = nullptr;
    CommMode comm_mode = CommMode::MULTI_PROCESS;
    std::string rank_table_file;
    /// "name" or "name:MB", at most 128 bytes.
    std::string comm_domain;
    /// Room for later fields; must be zero.
    std::array<uint8_t, 64> rsv{};

    bool operator==(const AllToAllVParam&) const = default;
};

}  // namespace alltoallv
