#include "runtime/hccl/hccl_group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <sstream>
#include <thread>
#include <utility>

#include "runtime/base/quiet_thread.h"
#include "runtime/base/seconds_text.h"
#include "runtime/core/hooks.h"
#include "runtime/hccl/library.h"
#include "runtime/hccl/result.h"
#include "runtime/hccl/synchronization.h"
#include "runtime/hccl/wire_type.h"

namespace alltoallv {
namespace {

constexpr int destroy_attempts = 200;  // of 10 ms

void check_borrowed(const HcclOptions& options) {
    uint32_t size = 0, rank = 0;
    const std::string where = "domain '" + options.domain + "'";
    check_hccl(cann().HcclGetRankSize(options.comm, &size), "HcclGetRankSize", where);
    check_hccl(cann().HcclGetRankId(options.comm, &rank), "HcclGetRankId", where);
    if (static_cast<int>(size) == options.size && static_cast<int>(rank) == options.rank) return;
    throw invalid_param(1102, "hccl_comm is rank ", rank, " of ", size, ", expected rank ", options.rank, " of ",
                        options.size);
}

std::string content_of(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
}

/// Returns a name that is equal on all ranks and different for every communicator: the domain, and a hash of data that
/// the ranks share. For a rank table this is its content, because hosts may have it at different paths.
std::string name_of(const HcclOptions& options) {
    uint64_t hash = 0xcbf29ce484222325;
    const std::string common = options.rank_table.empty() ? options.root_info : content_of(options.rank_table);
    for (const char c : options.domain + '\0' + common) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
    char suffix[24];
    std::snprintf(suffix, sizeof suffix, "-%016llx", static_cast<unsigned long long>(hash));
    return options.domain.substr(0, 90) + suffix;
}

/// True if this HCCL accepts a configuration with the buffer's size and the name; older releases do not.
bool configures(const HcclOptions& options) {
    if (!options.rank_table.empty()) return cann().HcclCommInitClusterInfoConfig != nullptr;
    return cann().HcclCommInitRootInfoConfig != nullptr;
}

/// Returns the setting that the user can change, with its value.
std::string buffer_of(const HcclOptions& options) {
    if (options.comm != nullptr) return buffer_variable() + ", or what the maker of hccl_comm has given it";
    if (!options.buffer_mb || !configures(options)) return buffer_variable();
    return "MB of domain=\"name:MB\" (now \"" + options.domain + ":" + std::to_string(*options.buffer_mb) +
           "\"; without it HCCL_BUFFSIZE applies)";
}

HcclResult init(const HcclOptions& options, std::atomic<const char*>& call, HcclComm* comm) {
    const HcclLibrary& hccl = cann();
    HcclCommConfig config = hccl_default_config();
    config.hcclBufferSize = static_cast<uint32_t>(options.buffer_mb.value_or(hccl_config_not_set));
    const std::string name = name_of(options);
    std::memcpy(config.hcclCommName, name.c_str(), std::min(name.size(), sizeof config.hcclCommName - 1));
    const auto rank = static_cast<uint32_t>(options.rank), size = static_cast<uint32_t>(options.size);
    if (!options.rank_table.empty()) {
        const char* const table = options.rank_table.c_str();
        call = configures(options) ? "HcclCommInitClusterInfoConfig" : "HcclCommInitClusterInfo";
        return configures(options) ? hccl.HcclCommInitClusterInfoConfig(table, rank, &config, comm)
                                   : hccl.HcclCommInitClusterInfo(table, rank, comm);
    }
    HcclRootInfo info;
    std::memcpy(info.internal, options.root_info.data(), sizeof info.internal);
    call = configures(options) ? "HcclCommInitRootInfoConfig" : "HcclCommInitRootInfo";
    return configures(options) ? hccl.HcclCommInitRootInfoConfig(size, &info, rank, &config, comm)
                               : hccl.HcclCommInitRootInfo(size, &info, rank, comm);
}

Error late(const std::string& where, const std::string& call, double waited) {
    return comm_timeout(4023, where, ": ", call, " was not done after ", seconds_text(waited),
                        ": a rank is late or gone; HCCL itself waits for HCCL_CONNECT_TIMEOUT seconds");
}

}  // namespace

std::string make_root_info() {
    HcclRootInfo info{};
    check_hccl(cann().HcclGetRootInfo(&info), "HcclGetRootInfo", "making a communicator");
    return {info.internal, sizeof info.internal};
}

std::string name_of(HcclComm comm) {
    char name[hccl_comm_name_bytes + 1] = {};
    check_hccl(cann().HcclGetCommName(comm, name), "HcclGetCommName", "a communicator of the caller");
    return name;
}

HcclGroup::HcclGroup(const HcclOptions& options, const Device& device, const std::function<void()>& poll)
    : size_(static_cast<size_t>(options.size)), buffer_(buffer_of(options)) {
    if (options.buffer_mb.value_or(0) >= hccl_config_not_set)
        throw invalid_param(1103, "comm_domain asks for ", *options.buffer_mb, " MB, expected less than ",
                            hccl_config_not_set, " for HCCL's buffer");
    if (options.comm != nullptr) {
        check_borrowed(options);
        comm_ = options.comm;
        return;
    }
    if (options.buffer_mb && !configures(options) && options.rank == 0 && hooks().warn)
        hooks().warn("domain '" + options.domain + ":" + std::to_string(*options.buffer_mb) +
                     "' asks for a buffer of that many MB, which this HCCL does not support (it has no " +
                     (options.rank_table.empty() ? "HcclCommInitRootInfoConfig" : "HcclCommInitClusterInfoConfig") +
                     "): " + buffer_variable() + " applies");
    // HCCL waits for all ranks and cannot be interrupted, so it runs on a thread that can be left behind.
    const std::string where = "rank " + std::to_string(options.rank) + " of domain '" + options.domain + "'";
    enum class State : uint8_t { running, done, abandoned };
    struct Call {
        HcclOptions options;
        HcclComm comm = nullptr;
        std::atomic<const char*> name{"HcclCommInitRootInfo"};
        aclError set_device = 0;
        HcclResult result = HCCL_SUCCESS;
        std::atomic<State> state{State::running};
    };
    const auto call = std::make_shared<Call>();
    call->options = options;
    std::thread thread = quiet_thread("alltoallv-hccl", "joining " + where, [call, index = device.index()] {
        call->set_device = cann().aclrtSetDevice(index);
        if (call->set_device == 0) call->result = init(call->options, call->name, &call->comm);
        if (call->state.exchange(State::done) == State::abandoned && call->comm != nullptr)
            cann().HcclCommDestroy(call->comm);
    });
    try {
        const auto begin = Clock::now();
        for (auto pause = std::chrono::microseconds(200); call->state.load() == State::running;) {
            std::this_thread::sleep_for(pause);
            pause = std::min(pause * 2, std::chrono::microseconds(20000));
            poll();
            if (const double waited = seconds_since(begin); waited >= options.timeout)
                throw late(where, call->name.load(), waited);
        }
    } catch (...) {
        // The later of the two threads destroys a communicator that nobody wants any more.
        if (call->state.exchange(State::abandoned) == State::done && call->comm != nullptr)
            cann().HcclCommDestroy(call->comm);
        thread.detach();
        throw;
    }
    thread.join();
    check_acl(call->set_device, "aclrtSetDevice", "device " + std::to_string(device.index()));
    if (call->result != HCCL_SUCCESS) throw hccl_error(call->result, call->name.load(), where, {buffer_, 0});
    comm_ = call->comm;
    owned_ = true;
}

HcclGroup::~HcclGroup() {
    try {
        destroy();
    } catch (const Error&) {
        // Nobody is left to inform.
    }
}

void HcclGroup::destroy() {
    if (!owned_) comm_ = nullptr;
    if (comm_ == nullptr) return;
    HcclResult result = HCCL_SUCCESS;
    for (int i = 0; i < destroy_attempts; ++i) {
        result = cann().HcclCommDestroy(comm_);
        if (result != HCCL_E_AGAIN || !synchronizes("destroy-again")) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    if (result != HCCL_E_AGAIN) comm_ = nullptr;
    check_hccl(result, "HcclCommDestroy", "leaving a domain");
}

void HcclGroup::check(HcclResult result, const char* call, const std::string& where, uint64_t bytes) const {
    if (result != HCCL_SUCCESS) throw hccl_error(result, call, where, {buffer_, bytes});
}

void HcclGroup::all_to_all_v(const void* input, void* output, const WireLayout& layout, HcclDataType type,
                             const OnStream& on) const {
    const uint64_t *sends = layout.data(), *recvs = sends + 2 * size_;
    const HcclResult result =
        cann().HcclAlltoAllV(input, sends, sends + size_, type, output, recvs, recvs + size_, type, comm_, on.stream);
    const auto total = [&](const uint64_t* counts) { return std::accumulate(counts, counts + size_, uint64_t{0}); };
    check(result, "HcclAlltoAllV", on.where, std::max(total(sends), total(recvs)) * bytes_of(type));
}

void HcclGroup::all_gather(const void* input, void* output, uint64_t count, HcclDataType type,
                           const OnStream& on) const {
    check(cann().HcclAllGather(const_cast<void*>(input), output, count, type, comm_, on.stream), "HcclAllGather",
          on.where, count * size_ * bytes_of(type));
}

void HcclGroup::reduce(OpKind kind, const void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op,
                       const OnStream& on) const {
    const bool scatters = kind == OpKind::reduce_scatter;
    const auto call = scatters ? cann().HcclReduceScatter : cann().HcclAllReduce;
    check(call(const_cast<void*>(input), output, count, type, op, comm_, on.stream),
          scatters ? "HcclReduceScatter" : "HcclAllReduce", on.where, count * (scatters ? size_ : 1) * bytes_of(type));
}

HcclResult HcclGroup::async_error() const {
    HcclResult error = HCCL_SUCCESS;
    if (cann().HcclGetCommAsyncError == nullptr) return error;
    return cann().HcclGetCommAsyncError(comm_, &error) == HCCL_SUCCESS ? error : HCCL_SUCCESS;
}

void HcclGroup::check_async_error(const std::string& where) const {
    check_hccl(async_error(), "HcclGetCommAsyncError", where);
}

}  // namespace alltoallv
