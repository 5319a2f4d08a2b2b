// What the transport hccl knows without a device: codes, ATB's param; CANN being absent.
#include <cstdlib>
#include <string>
#include <vector>

#include "all_to_all_v/atb_param.h"
#include "check.h"
#include "runtime/hccl/library.h"
#include "runtime/hccl/result.h"

using namespace alltoallv;  // NOLINT

namespace {

TEST(results_become_codes_of_atb) {
    CHECK(code_of(HCCL_SUCCESS) == ErrorType::NO_ERROR);
    CHECK(code_of(HCCL_E_PARA) == ErrorType::INVALID_PARAM);
    CHECK(code_of(HCCL_E_MEMORY) == ErrorType::OUT_OF_DEVICE_MEMORY);
    CHECK(code_of(HCCL_E_OOM) == ErrorType::OUT_OF_DEVICE_MEMORY);
    for (const HcclResult other : {HCCL_E_PTR, HCCL_E_INTERNAL, HCCL_E_TIMEOUT, HCCL_E_REMOTE})
        CHECK(code_of(other) == ErrorType::HCCL_FAIL);
    CHECK_EQ(hccl_name(HCCL_E_OPRETRY_FAIL), std::string("HCCL_E_OPRETRY_FAIL"));
    CHECK_EQ(hccl_name(static_cast<HcclResult>(99)), std::string("HcclResult 99"));
}

/// The fields of atb::infer::AllToAllVParam, in its order and with its types.
struct AtbParam {
    enum CommMode : int { COMM_UNDEFINED = -1, COMM_MULTI_PROCESS = 0, COMM_MULTI_THREAD = 1 };
    int rank = 0;
    int rankSize = 0;
    int rankRoot = 0;
    std::vector<int64_t> sendCounts, sdispls, recvCounts, rdispls;
    std::string backend = "hccl";
    HcclComm hcclComm = nullptr;
    CommMode commMode = COMM_MULTI_PROCESS;
    std::string rankTableFile, commDomain;
    uint8_t rsv[64] = {0};
};

TEST(param_of_atb) {
    CHECK(from_atb(AtbParam()) == AllToAllVParam());
    int comm = 0;
    AtbParam atb{1,
                 3,
                 2,
                 {1, 2, 3},
                 {4, 5, 6},
                 {7, 8, 9},
                 {10, 11, 12},
                 "lccl",
                 &comm,
                 AtbParam::COMM_MULTI_THREAD,
                 "table.json",
                 "domain"};
    atb.rsv[63] = 7;
    AllToAllVParam expected;
    expected.rank = 1;
    expected.rank_size = 3;
    expected.rank_root = 2;
    expected.send_counts = {1, 2, 3};
    expected.sdispls = {4, 5, 6};
    expected.recv_counts = {7, 8, 9};
    expected.rdispls = {10, 11, 12};
    expected.backend = "lccl";
    expected.hccl_comm = &comm;
    expected.comm_mode = CommMode::MULTI_THREAD;
    expected.rank_table_file = "table.json";
    expected.comm_domain = "domain";
    expected.rsv[63] = 7;
    CHECK(from_atb(atb) == expected);
}

}  // namespace
