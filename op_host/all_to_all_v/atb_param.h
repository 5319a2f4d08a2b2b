// Converts Huawei's `atb::infer::AllToAllVParam` to our param, field by field, for programs that have ATB.
//
// This is a template, so ATB is needed only where it is used.
//
//     alltoallv::AllToAllVOperation operation(alltoallv::from_atb(param), device, connect);
#pragma once

#include <algorithm>
#include <iterator>
#include <type_traits>

#include "all_to_all_v/param.h"

namespace alltoallv {

/// `Param` has ATB's fields. Nothing is checked here; the operation does it, in ATB's order and with ATB's codes.
template <class Param>
AllToAllVParam from_atb(const Param& atb) {
    static_assert(sizeof(atb.rsv) == sizeof(AllToAllVParam::rsv), "ATB's reserved bytes have changed");
    static_assert(std::is_pointer_v<decltype(atb.hcclComm)>, "HcclComm is a pointer");
    AllToAllVParam param;
    param.rank = atb.rank;
    param.rank_size = atb.rankSize;
    param.rank_root = atb.rankRoot;
    param.send_counts.assign(atb.sendCounts.begin(), atb.sendCounts.end());
    param.sdispls.assign(atb.sdispls.begin(), atb.sdispls.end());
    param.recv_counts.assign(atb.recvCounts.begin(), atb.recvCounts.end());
    param.rdispls.assign(atb.rdispls.begin(), atb.rdispls.end());
    param.backend = atb.backend;
    param.hccl_comm = atb.hcclComm;
    param.comm_mode = static_cast<CommMode>(static_cast<int>(atb.commMode));
    param.rank_table_file = atb.rankTableFile;
    param.comm_domain = atb.commDomain;
    std::copy(std::begin(atb.rsv), std::end(atb.rsv), param.rsv.begin());
    return param;
}

}  // namespace alltoallv
