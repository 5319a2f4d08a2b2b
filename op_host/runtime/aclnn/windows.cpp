#include "runtime/aclnn/windows.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
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

/// The windows of one group, as long as its communicator lives.
class Windows {
  public:
    Windows(const std::string& name, const Group& group, uint32_t number)
        : parent(group.comm), comm_(clone(name, group, number)) {
        try {
            link(group);
            meet();
        } catch (...) {
            HcclCommDestroy(comm_);
            throw;
        }
    }
    ~Windows() { HcclCommDestroy(comm_); }
    Windows(const Windows&) = delete;
    Windows& operator=(const Windows&) = delete;

    const HcclComm parent;
    WindowTiling tiling{};

  private:
    /// A communicator of the same ranks under a name of its own, which is the same on all of them.
    static HcclComm clone(const std::string& name, const Group& group, uint32_t number) {
        std::vector<uint32_t> ranks(group.size);
        std::iota(ranks.begin(), ranks.end(), 0u);
        HcclCommConfig config = hccl_default_config();
        config.hcclBufferSize = buffer_mb;
        const std::string suffix = "-windows" + std::to_string(number);
        const size_t room = hccl_comm_name_bytes - 1 - suffix.size();  // the end of a long name is its unique part
        const std::string own = name.substr(name.size() - std::min(name.size(), room)) + suffix;
        std::memcpy(config.hcclCommName, own.c_str(), own.size());
        HcclComm parent = group.comm, comm = nullptr;
        require_success("HcclCreateSubCommConfig", hccl().HcclCreateSubCommConfig(&parent, group.size, ranks.data(),
                                                                                  number, group.rank, &config, &comm));
        return comm;
    }

    void link(const Group& group) {
        void *args = nullptr, *context = nullptr, *own = nullptr;
        uint64_t bytes = 0;
        require_success("HcclGetHcclBuffer", hccl().HcclGetHcclBuffer(comm_, &own, &bytes));
        require_success("HcclKfcAllocOpArgs", hccl().HcclKfcAllocOpArgs(&args));
        HcclResult result = hccl().HcclKfcOpArgsSetCommEngine(args, engine_vector_cores);
        if (result == HCCL_SUCCESS) result = hccl().HcclCreateOpResCtx(comm_, all_to_all_v, args, &context);
        hccl().HcclKfcFreeOpArgs(args);
        require_success("HcclCreateOpResCtx", result);
        std::vector<uint64_t> addresses;
        for (uint32_t j = 0; j < group.size; ++j) {
            void* address = own;
            uint64_t of_peer = bytes;
            if (j != group.rank)
                require_success("HcclGetRemoteIpcHcclBuf",
                                hccl().HcclGetRemoteIpcHcclBuf(comm_, j, &address, &of_peer));
            bytes = std::min(bytes, of_peer);
            addresses.push_back(reinterpret_cast<uint64_t>(address));
        }
        tiling = plan_window(bytes, group.size, lanes());
        tiling.rank = group.rank;
        std::copy(addresses.begin(), addresses.end(), tiling.windows);
        const std::vector<char> zeros(alltoallv_kernels::data_place);
        require_success("aclrtMemcpy",
                        aclrtMemcpy(own, zeros.size(), zeros.data(), zeros.size(), ACL_MEMCPY_HOST_TO_DEVICE));
    }

    /// Nobody writes a flag into a window that its owner still zeroes.
    void meet() const {
        on_a_stream("HcclBarrier", [&](aclrtStream stream) { return hccl().HcclBarrier(comm_, stream); });
    }

    HcclComm comm_;
};

/// HCCL's name of a group, and this rank in it: ranks may be threads of one process. A later group may have the name of
/// one that was destroyed.
using Key = std::pair<std::string, uint32_t>;
Key key_of(const Group& group) {
    char name[hccl_comm_name_bytes + 1] = {};
    require_success("HcclGetCommName", HcclGetCommName(group.comm, name));
    return {name, group.rank};
}

/// The highest of the ranks' numbers.
uint32_t highest(const Group& group, uint32_t number) {
    void* memory = nullptr;
    require_success("aclrtMalloc", aclrtMalloc(&memory, sizeof number, ACL_MEM_MALLOC_HUGE_FIRST));
    try {
        require_success("aclrtMemcpy",
                        aclrtMemcpy(memory, sizeof number, &number, sizeof number, ACL_MEMCPY_HOST_TO_DEVICE));
        on_a_stream("HcclAllReduce", [&](aclrtStream stream) {
            return HcclAllReduce(memory, memory, 1, HCCL_DATA_TYPE_INT32, HCCL_REDUCE_MAX, group.comm, stream);
        });
        require_success("aclrtMemcpy",
                        aclrtMemcpy(&number, sizeof number, memory, sizeof number, ACL_MEMCPY_DEVICE_TO_HOST));
    } catch (...) {
        aclrtFree(memory);
        throw;
    }
    aclrtFree(memory);
    return number;
}

std::mutex mutex;
auto& known = *new std::map<Key, std::shared_ptr<Windows>>;  // never destroyed: ACL may have ended

}  // namespace

void forget_windows(const char* name) {
    std::vector<std::shared_ptr<Windows>> last;  // destroyed without the lock
    const std::lock_guard lock(mutex);
    const auto named = [&](const auto& entry) { return entry.first.first == name; };
    // Only where ranks are threads is HCCL asked for this one: the communicator may have been destroyed before.
    const bool several = std::count_if(known.begin(), known.end(), named) > 1;
    const uint32_t rank = several ? group_named(name).rank : 0;
    for (auto entry = known.begin(); entry != known.end();) {
        const bool forgotten = named(*entry) && (!several || entry->first.second == rank);
        if (forgotten) last.push_back(std::move(entry->second));
        entry = forgotten ? known.erase(entry) : std::next(entry);
    }
}

std::shared_ptr<const WindowTiling> windows_of(const Group& group) {
    static auto& made = *new std::map<Key, uint32_t>;  // not the same on all: processes may have had other groups
    if (!hccl().complete() || group.size > alltoallv_kernels::most_ranks) return nullptr;
    const Key key = key_of(group);
    std::shared_ptr<Windows> last;  // destroyed without the lock
    uint32_t number = 0;
    {
        const std::lock_guard lock(mutex);
        const auto found = known.find(key);
        if (found != known.end() && found->second->parent == group.comm) return {found->second, &found->second->tiling};
        if (found != known.end()) last = std::exchange(found->second, nullptr), known.erase(found);
        number = made[key] + 1;
    }
    // Without the lock: it waits for the other ranks, which may be threads of this process.
    number = highest(group, number);
    const auto fresh = std::make_shared<Windows>(key.first, group, number);
    const std::lock_guard lock(mutex);
    made[key] = number;
    known.emplace(key, fresh);
    return {fresh, &fresh->tiling};
}

}  // namespace alltoallv::aclnn
