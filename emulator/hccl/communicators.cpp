// HCCL's functions that make, name, query and destroy communicators.
#include <fstream>
#include <sstream>

#include "hccl/launch.h"
#include "hccl/rank_table.h"
#include "runtime/base/sha256.h"
#include "runtime/device.h"

using namespace alltoallv;
using namespace alltoallv::emulator;

namespace {

constexpr char root_magic[] = "alltoallv emulator root 1 ";  // before the job's name, in an HcclRootInfo

std::string unique_job() {
    return hex(random_digest()).substr(0, 32);
}

std::string job_of(const HcclRootInfo* info) {
    check_given("rootInfo", info);
    const std::string text(info->internal, strnlen(info->internal, sizeof info->internal));
    if (text.rfind(root_magic, 0) != 0)
        throw Failure(HCCL_E_PARA, "rootInfo was not made by HcclGetRootInfo of this library");
    return text.substr(sizeof root_magic - 1);
}

/// Copies the relevant fields of a configuration, after checking that it was initialized.
void configure(CommSpec& spec, const HcclCommConfig* config) {
    if (config == nullptr) return;
    HcclCommConfigInfo info;
    std::memcpy(&info, config->reserved, sizeof info);
    if (info.magic != hccl_comm_config_magic || info.size == 0 || info.size > sizeof(HcclCommConfig))
        throw Failure(HCCL_E_PARA, "config has not been initialized by HcclCommConfigInit");
    if (config->hcclBufferSize == 0) throw Failure(HCCL_E_PARA, "hcclBufferSize is 0, expected at least 1 MB");
    if (config->hcclBufferSize != hccl_config_not_set) spec.buffer_mb = config->hcclBufferSize;
    const std::string name(config->hcclCommName, strnlen(config->hcclCommName, sizeof config->hcclCommName));
    if (name.size() >= hccl_comm_name_bytes) throw Failure(HCCL_E_PARA, "hcclCommName is longer than 127 bytes");
    if (!name.empty()) spec.name = name;
    const auto exec_timeout = static_cast<uint32_t>(config->hcclExecTimeOut);
    if (exec_timeout != hccl_config_not_set && exec_timeout > 0) spec.exec_timeout = exec_timeout;
}

void check_rank(uint32_t rank, uint32_t size) {
    if (size == 0) throw Failure(HCCL_E_PARA, "the communicator has 0 ranks, expected at least 1");
    if (rank >= size) throw Failure(HCCL_E_PARA, "rank is ", rank, ", expected less than ", size);
}

/// Makes rank `rank` of `size`, with the rest of its options.
HcclComm make_comm(CommSpec spec, uint32_t rank, uint32_t size, const HcclCommConfig* config) {
    spec.rank = static_cast<int>(rank);
    spec.size = static_cast<int>(size);
    configure(spec, config);
    return add_comm(std::make_shared<Comm>(spec));
}

/// The options of a communicator whose name is its own.
CommSpec named_by(const std::string& job) {
    CommSpec spec;
    spec.job = job;
    spec.name = "group_" + job.substr(0, 12);
    return spec;
}

void init_root(uint32_t nRanks, const HcclRootInfo* rootInfo, uint32_t rank, const HcclCommConfig* config,
               HcclComm* comm) {
    check_given("comm", comm);
    check_rank(rank, nRanks);
    const int device = current_device();
    CommSpec spec = named_by(job_of(rootInfo));
    spec.device = device;
    *comm = make_comm(spec, rank, nRanks, config);
}

void init_cluster(const char* clusterInfo, uint32_t rank, const HcclCommConfig* config, HcclComm* comm) {
    check_given("clusterInfo", clusterInfo);
    check_given("comm", comm);
    CommSpec spec;
    spec.device = current_device();
    std::ifstream file(clusterInfo);
    if (!file) throw Failure(HCCL_E_OPEN_FILE_FAILURE, "the rank table '", clusterInfo, "' cannot be read");
    std::ostringstream text;
    text << file.rdbuf();
    const uint32_t size = ranks_of_table(text.str());
    check_rank(rank, size);
    const char* user_job = std::getenv("ALLTOALLV_JOB_ID");
    spec.job = "table-" + std::to_string(std::hash<std::string>{}(text.str())) + (user_job ? user_job : "");
    spec.name = "hccl_world_group";
    *comm = make_comm(spec, rank, size, config);
}

}  // namespace

HcclResult HcclGetRootInfo(HcclRootInfo* rootInfo) {
    return guarded_hccl(__func__, [&] {
        check_given("rootInfo", rootInfo);
        (void)current_device();
        *rootInfo = HcclRootInfo{};
        const std::string text = root_magic + unique_job();
        std::memcpy(rootInfo->internal, text.data(), text.size());
    });
}

HcclResult HcclCommInitRootInfo(uint32_t nRanks, const HcclRootInfo* rootInfo, uint32_t rank, HcclComm* comm) {
    return guarded_hccl(__func__, [&] { init_root(nRanks, rootInfo, rank, nullptr, comm); });
}

HcclResult HcclCommInitRootInfoConfig(uint32_t nRanks, const HcclRootInfo* rootInfo, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* comm) {
    return guarded_hccl(__func__, [&] {
        check_given("config", config);
        init_root(nRanks, rootInfo, rank, config, comm);
    });
}

HcclResult HcclCommInitClusterInfo(const char* clusterInfo, uint32_t rank, HcclComm* comm) {
    return guarded_hccl(__func__, [&] { init_cluster(clusterInfo, rank, nullptr, comm); });
}

HcclResult HcclCommInitClusterInfoConfig(const char* clusterInfo, uint32_t rank, HcclCommConfig* config,
                                         HcclComm* comm) {
    return guarded_hccl(__func__, [&] {
        check_given("config", config);
        init_cluster(clusterInfo, rank, config, comm);
    });
}

/// Makes communicators whose ranks are devices of this process.
HcclResult HcclCommInitAll(uint32_t ndev, int32_t* devices, HcclComm* comms) {
    return guarded_hccl(__func__, [&] {
        check_given("devices", devices);
        check_given("comms", comms);
        if (ndev == 0) throw Failure(HCCL_E_PARA, "ndev is 0, expected at least 1");
        for (uint32_t i = 0; i < ndev; ++i) check_device(devices[i]);
        CommSpec common = named_by(unique_job());
        common.threads = true;
        in_threads(ndev, [&](size_t i) {
            CommSpec spec = common;
            spec.device = devices[i];
            comms[i] = make_comm(spec, static_cast<uint32_t>(i), ndev, nullptr);
        });
    });
}

/// All ranks of `comm` call it; those that are not among `rankIds` pass none and get a null communicator.
HcclResult HcclCreateSubCommConfig(HcclComm* comm, uint32_t rankNum, uint32_t* rankIds, uint64_t subCommId,
                                   uint32_t subCommRankId, HcclCommConfig* config, HcclComm* subComm) {
    return guarded_hccl(__func__, [&] {
        check_given("comm", comm);
        check_given("subComm", subComm);
        const CommPtr parent = comm_of(*comm);
        if (rankIds == nullptr) {
            if (subCommId != hccl_config_not_set) throw Failure(HCCL_E_PTR, "rankIds is null");
            *subComm = nullptr;
            return;
        }
        check_given("config", config);
        check_rank(subCommRankId, rankNum);
        std::string members;
        for (uint32_t i = 0; i < rankNum; ++i) {
            check_rank(rankIds[i], static_cast<uint32_t>(parent->size()));
            for (uint32_t j = 0; j < i; ++j)
                if (rankIds[i] == rankIds[j]) throw Failure(HCCL_E_PARA, "rankIds names rank ", rankIds[i], " twice");
            members += "-" + std::to_string(rankIds[i]);
        }
        if (rankIds[subCommRankId] != static_cast<uint32_t>(parent->rank()))
            throw Failure(HCCL_E_PARA, "rankIds[", subCommRankId, "] is ", rankIds[subCommRankId],
                          ", but this rank is ", parent->rank());
        CommSpec spec = parent->spec();
        const std::string end = "_sub_" + std::to_string(subCommId);  // a name has at most 127 bytes
        spec.name = parent->spec().name.substr(0, hccl_comm_name_bytes - 1 - end.size()) + end;
        spec.job += "/" + std::to_string(subCommId) + members;
        *subComm = make_comm(spec, subCommRankId, rankNum, config);
    });
}

HcclResult HcclCommDestroy(HcclComm comm) {
    return guarded_hccl(__func__, [&] {
        const CommPtr c = comm_of(comm);
        if (const int pending = c->pending; pending > 0)
            throw Failure(HCCL_E_AGAIN, pending, " calls of '", c->spec().name,
                          "' have not finished: synchronize their streams first");
        remove_comm(comm);
        c->destroy();
        if (finalized())
            throw Failure(HCCL_E_RUNTIME, "'", c->spec().name, "' has outlived ACL: aclFinalize was called before");
    });
}

HcclResult HcclGetCommName(HcclComm comm, char* commName) {
    return guarded_hccl(__func__, [&] {
        check_given("commName", commName);
        const std::string& name = comm_of(comm)->spec().name;
        std::memcpy(commName, name.c_str(), name.size() + 1);
    });
}

HcclResult HcclGetRankSize(HcclComm comm, uint32_t* rankSize) {
    return guarded_hccl(__func__, [&] {
        check_given("rankSize", rankSize);
        *rankSize = static_cast<uint32_t>(comm_of(comm)->size());
    });
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
    return guarded_hccl(__func__, [&] {
        check_given("rank", rank);
        *rank = static_cast<uint32_t>(comm_of(comm)->rank());
    });
}

/// Returns the first failure of a task of this communicator, as long as it lives.
HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult* asyncError) {
    return guarded_hccl(__func__, [&] {
        check_given("asyncError", asyncError);
        *asyncError = comm_of(comm)->async_error();
    });
}
