#include "runtime/hccl/device_windows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>

#include "runtime/base/error.h"
#include "runtime/hccl/library.h"
#include "runtime/hccl/result.h"

namespace alltoallv {
namespace {

constexpr const char* windows_text = "the windows of a communicator";
constexpr uint8_t all_to_all_v = 8;         // HCCL's number of the operator whose links are made
constexpr uint8_t engine_vector_cores = 4;  // its kernels reach windows by addresses

/// Throws unless this HCCL has all functions that windows need.
void check_library() {
    const HcclLibrary& hccl = cann();
    const std::pair<const char*, bool> functions[] = {
        {"HcclCreateSubCommConfig", hccl.HcclCreateSubCommConfig != nullptr},
        {"HcclGetHcclBuffer", hccl.HcclGetHcclBuffer != nullptr},
        {"HcclGetRemoteIpcHcclBuf", hccl.HcclGetRemoteIpcHcclBuf != nullptr},
        {"HcclKfcAllocOpArgs", hccl.HcclKfcAllocOpArgs != nullptr},
        {"HcclKfcFreeOpArgs", hccl.HcclKfcFreeOpArgs != nullptr},
        {"HcclKfcOpArgsSetCommEngine", hccl.HcclKfcOpArgsSetCommEngine != nullptr},
        {"HcclCreateOpResCtx", hccl.HcclCreateOpResCtx != nullptr},
        {"HcclBarrier", hccl.HcclBarrier != nullptr},
    };
    for (const auto& [name, found] : functions)
        if (!found)
            throw backend_unavailable(windows_text, " need the function ", name,
                                      ", which this libhccl.so does not have");
}

/// A communicator of the same ranks under a name of its own, which is the same on all of them.
HcclComm clone(HcclComm parent, uint32_t rank, uint32_t size) {
    static std::atomic<uint64_t> made{0};  // ranks make theirs in the same order
    std::vector<uint32_t> ranks(size);
    std::iota(ranks.begin(), ranks.end(), 0u);
    HcclCommConfig config = hccl_default_config();
    char name[hccl_comm_name_bytes + 1] = {};
    check_hccl(cann().HcclGetCommName(parent, name), "HcclGetCommName", windows_text);
    const uint64_t number = ++made;
    const std::string suffix = "-windows" + std::to_string(number);
    const std::string own = std::string(name).substr(0, hccl_comm_name_bytes - 1 - suffix.size()) + suffix;
    std::memcpy(config.hcclCommName, own.c_str(), own.size());
    HcclComm comm = nullptr;
    check_hccl(cann().HcclCreateSubCommConfig(&parent, size, ranks.data(), number, rank, &config, &comm),
               "HcclCreateSubCommConfig", windows_text);
    return comm;
}

/// Returns after all ranks have called it.
void meet(HcclComm comm) {
    aclrtStream stream = nullptr;
    check_acl(cann().aclrtCreateStream(&stream), "aclrtCreateStream", windows_text);
    const HcclResult result = cann().HcclBarrier(comm, stream);
    const aclError finished =
        result == HCCL_SUCCESS ? cann().aclrtSynchronizeStreamWithTimeout(stream, -1) : aclError{0};
    cann().aclrtDestroyStream(stream);
    check_hccl(result, "HcclBarrier", windows_text);
    check_acl(finished, "aclrtSynchronizeStreamWithTimeout", windows_text);
}

}  // namespace

DeviceWindows::DeviceWindows(HcclComm parent, uint64_t zeroed) {
    check_library();
    uint32_t size = 0;
    check_hccl(cann().HcclGetRankSize(parent, &size), "HcclGetRankSize", windows_text);
    check_hccl(cann().HcclGetRankId(parent, &rank_), "HcclGetRankId", windows_text);
    comm_ = clone(parent, rank_, size);
    addresses_.resize(size);
    try {
        link();
        if (zeroed > bytes_)
            throw backend_unavailable(windows_text, " have ", bytes_, " bytes, expected at least ", zeroed,
                                      ": raise HCCL_BUFFSIZE");
        const std::vector<char> zeros(zeroed);
        check_acl(cann().aclrtMemcpy(addresses_[rank_], zeroed, zeros.data(), zeroed, ACL_MEMCPY_HOST_TO_DEVICE),
                  "aclrtMemcpy", windows_text);
        meet(comm_);  // nobody writes a flag into a window that its owner still zeroes
    } catch (...) {
        cann().HcclCommDestroy(comm_);
        throw;
    }
}

DeviceWindows::~DeviceWindows() {
    if (comm_ != nullptr) cann().HcclCommDestroy(comm_);
}

void DeviceWindows::link() {
    void *args = nullptr, *context = nullptr;
    check_hccl(cann().HcclGetHcclBuffer(comm_, &addresses_[rank_], &bytes_), "HcclGetHcclBuffer", windows_text);
    check_hccl(cann().HcclKfcAllocOpArgs(&args), "HcclKfcAllocOpArgs", windows_text);
    HcclResult result = cann().HcclKfcOpArgsSetCommEngine(args, engine_vector_cores);
    if (result == HCCL_SUCCESS) result = cann().HcclCreateOpResCtx(comm_, all_to_all_v, args, &context);
    cann().HcclKfcFreeOpArgs(args);
    check_hccl(result, "HcclCreateOpResCtx", windows_text);
    for (uint32_t j = 0; j < size(); ++j) {
        if (j == rank_) continue;
        uint64_t bytes = 0;
        check_hccl(cann().HcclGetRemoteIpcHcclBuf(comm_, j, &addresses_[j], &bytes), "HcclGetRemoteIpcHcclBuf",
                   windows_text);
        bytes_ = std::min(bytes_, bytes);
    }
}

}  // namespace alltoallv
