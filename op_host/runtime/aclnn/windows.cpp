#include "runtime/aclnn/windows.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/abi/hccl_windows.h"
#include "runtime/aclnn/platform.h"
#include "runtime/window/plan.h"

namespace alltoallv::aclnn {
namespace {

using alltoallv_kernels::WindowTiling;

constexpr uint8_t all_to_all_v = 8;         // HCCL's number of the operator whose links are made
constexpr uint8_t engine_vector_cores = 4;  // its kernels reach windows by addresses
constexpr uint32_t buffer_mb = 32;          // a window has twice as much

/// What no public header has completely, looked up by name; null where a release lacks it.
struct Functions {
#define ALLTOALLV_FIND(name) decltype(&::name) name = reinterpret_cast<decltype(&::name)>(dlsym(RTLD_DEFAULT, #name));
    ALLTOALLV_WINDOW_CALLS(ALLTOALLV_FIND)
#undef ALLTOALLV_FIND

    bool complete() const {
#define ALLTOALLV_HAS(name) &&(name) != nullptr
        return true ALLTOALLV_WINDOW_CALLS(ALLTOALLV_HAS);
#undef ALLTOALLV_HAS
    }
};

const Functions& hccl() {
    static const Functions functions;
    return functions;
}

/// Waits for what `enqueue` puts into a stream of its own.
template <class Enqueue>
void on_a_stream(const char* call, Enqueue enqueue) {
    aclrtStream stream = nullptr;
    require_success("aclrtCreateStream", aclrtCreateStream(&stream));
    const HcclResult result = enqueue(stream);
    const int finished = result == HCCL_SUCCESS ? aclrtSynchronizeStreamWithTimeout(stream, -1) : 0;
    aclrtDestroyStream(stream);
    require_success(call, result);
    require_success("aclrtSynchronizeStreamWithTimeout", finished);
}

/// The windows of one group, as long as its communicator lives. Each step of which HCCL waits for all ranks comes after
/// an agreement that all have done theirs, so that nobody waits for a rank that has failed.
class Windows {
  public:
    Windows(const std::string& name, const Group& group, uint32_t number, const Highest& highest)
        : parent(group.comm), group_(group), highest_(highest) {
        together([&] {
            clone(name, number);
            require_success("HcclGetHcclBuffer", hccl().HcclGetHcclBuffer(comm_, &own_, &bytes_));
            require_success("HcclKfcAllocOpArgs", hccl().HcclKfcAllocOpArgs(&args_));
            require_success("HcclKfcOpArgsSetCommEngine",
                            hccl().HcclKfcOpArgsSetCommEngine(args_, engine_vector_cores));
        });
        together([&] {
            void* context = nullptr;
            require_success("HcclCreateOpResCtx", hccl().HcclCreateOpResCtx(comm_, all_to_all_v, args_, &context));
            hccl().HcclKfcFreeOpArgs(std::exchange(args_, nullptr));
            fill_in();
        });  // nobody writes a flag into a window that its owner still zeroes
    }
    ~Windows() { release(); }
    Windows(const Windows&) = delete;
    Windows& operator=(const Windows&) = delete;

    const HcclComm parent;
    WindowTiling tiling{};

  private:
    template <class Step>
    void together(Step step) {
        std::exception_ptr own_error;
        try {
            step();
        } catch (...) {
            own_error = std::current_exception();
            release();  // before the others know: who waits for this rank in HCCL may notice
        }
        uint32_t failed = 0;
        try {
            failed = highest_(own_error ? group_.rank + 1 : 0);
        } catch (...) {
            release();
            if (!own_error) throw;
        }
        if (own_error) std::rethrow_exception(own_error);
        if (failed == 0) return;
        release();
        throw Refusal(aclnn_err_runtime_error,
                      "rank " + std::to_string(failed - 1) + " has failed to make its windows");
    }

    void release() {
        if (args_ != nullptr) hccl().HcclKfcFreeOpArgs(std::exchange(args_, nullptr));
        if (comm_ != nullptr) HcclCommDestroy(std::exchange(comm_, nullptr));
    }

    /// A communicator of the same ranks under a name of its own, which is the same on all of them.
    void clone(const std::string& name, uint32_t number) {
        std::vector<uint32_t> ranks(group_.size);
        std::iota(ranks.begin(), ranks.end(), 0u);
        HcclCommConfig config = hccl_default_config();
        config.hcclBufferSize = buffer_mb;
        const std::string suffix = "-windows" + std::to_string(number);
        const size_t room = hccl_comm_name_bytes - 1 - suffix.size();  // the end of a long name is its unique part
        const std::string own = name.substr(name.size() - std::min(name.size(), room)) + suffix;
        std::memcpy(config.hcclCommName, own.c_str(), own.size());
        HcclComm from = group_.comm;
        require_success(
            "HcclCreateSubCommConfig",
            hccl().HcclCreateSubCommConfig(&from, group_.size, ranks.data(), number, group_.rank, &config, &comm_));
    }

    void fill_in() {
        std::vector<uint64_t> addresses;
        for (uint32_t j = 0; j < group_.size; ++j) {
            void* address = own_;
            uint64_t of_peer = bytes_;
            if (j != group_.rank)
                require_success("HcclGetRemoteIpcHcclBuf",
                                hccl().HcclGetRemoteIpcHcclBuf(comm_, j, &address, &of_peer));
            bytes_ = std::min(bytes_, of_peer);
            addresses.push_back(reinterpret_cast<uint64_t>(address));
        }
        tiling = plan_window(bytes_, group_.size, lanes());
        tiling.rank = group_.rank;
        std::copy(addresses.begin(), addresses.end(), tiling.windows);
        const std::vector<char> zeros(alltoallv_kernels::data_place);
        require_success("aclrtMemcpy",
                        aclrtMemcpy(own_, zeros.size(), zeros.data(), zeros.size(), ACL_MEMCPY_HOST_TO_DEVICE));
    }

    const Group group_;
    const Highest& highest_;  // while it is made
    HcclComm comm_ = nullptr;
    void *args_ = nullptr, *own_ = nullptr;
    uint64_t bytes_ = 0;
};

/// HCCL's name of a group, and this rank in it: ranks may be threads of one process. A later group may have the name of
/// one that was destroyed.
using Key = std::pair<std::string, uint32_t>;
Key key_of(const Group& group) {
    char name[hccl_comm_name_bytes + 1] = {};
    require_success("HcclGetCommName", HcclGetCommName(group.comm, name));
    return {name, group.rank};
}

/// Agrees over HCCL, on the ranks of a group.
class OverHccl {
  public:
    explicit OverHccl(const Group& group) : comm_(group.comm) {
        require_success("aclrtMalloc", aclrtMalloc(&memory_, sizeof(uint32_t), ACL_MEM_MALLOC_HUGE_FIRST));
    }
    ~OverHccl() { aclrtFree(memory_); }
    OverHccl(const OverHccl&) = delete;
    OverHccl& operator=(const OverHccl&) = delete;

    uint32_t highest(uint32_t number) const {
        require_success("aclrtMemcpy",
                        aclrtMemcpy(memory_, sizeof number, &number, sizeof number, ACL_MEMCPY_HOST_TO_DEVICE));
        on_a_stream("HcclAllReduce", [&](aclrtStream stream) {
            return HcclAllReduce(memory_, memory_, 1, HCCL_DATA_TYPE_INT32, HCCL_REDUCE_MAX, comm_, stream);
        });
        require_success("aclrtMemcpy",
                        aclrtMemcpy(&number, sizeof number, memory_, sizeof number, ACL_MEMCPY_DEVICE_TO_HOST));
        return number;
    }

  private:
    const HcclComm comm_;
    void* memory_ = nullptr;
};

std::mutex mutex;
auto& open_windows = *new std::map<Key, std::shared_ptr<Windows>>;  // never destroyed: ACL may have ended

}  // namespace

void forget_windows(const char* name) {
    std::vector<std::shared_ptr<Windows>> last;  // destroyed without the lock
    const std::lock_guard lock(mutex);
    const auto named = [&](const auto& entry) { return entry.first.first == name; };
    // Only where ranks are threads is HCCL asked for this one: the communicator may have been destroyed before.
    const bool several = std::count_if(open_windows.begin(), open_windows.end(), named) > 1;
    const uint32_t rank = several ? group_named(name).rank : 0;
    for (auto entry = open_windows.begin(); entry != open_windows.end();) {
        const bool forgotten = named(*entry) && (!several || entry->first.second == rank);
        if (forgotten) last.push_back(std::move(entry->second));
        entry = forgotten ? open_windows.erase(entry) : std::next(entry);
    }
}

std::shared_ptr<const WindowTiling> windows_of(const Group& group, const Highest& chosen) {
    static auto& numbers = *new std::map<Key, uint32_t>;  // not the same on all: processes may have had other groups
    if (!hccl().complete() || group.size > alltoallv_kernels::most_ranks) return nullptr;
    const Key key = key_of(group);
    std::shared_ptr<Windows> last;  // destroyed without the lock
    uint32_t number = 0;
    {
        const std::lock_guard lock(mutex);
        const auto entry = open_windows.find(key);
        if (entry != open_windows.end() && entry->second->parent == group.comm)
            return {entry->second, &entry->second->tiling};
        if (entry != open_windows.end()) last = std::exchange(entry->second, nullptr), open_windows.erase(entry);
        number = numbers[key] + 1;
    }
    // Without the lock: it waits for the other ranks, which may be threads of this process.
    std::optional<OverHccl> over_hccl;
    const Highest highest = chosen ? chosen : [&](uint32_t own) { return over_hccl->highest(own); };
    if (!chosen) over_hccl.emplace(group);
    number = highest(number);
    {
        const std::lock_guard lock(mutex);
        numbers[key] = number;
    }
    const auto fresh = std::make_shared<Windows>(key.first, group, number, highest);
    const std::lock_guard lock(mutex);
    open_windows.emplace(key, fresh);
    return {fresh, &fresh->tiling};
}

}  // namespace alltoallv::aclnn
