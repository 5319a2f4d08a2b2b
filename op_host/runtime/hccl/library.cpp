#include "runtime/hccl/library.h"

#include <dlfcn.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/error.h"

namespace alltoallv {
namespace {

constexpr const char* cann_advice =
    "install CANN and run `source <CANN>/set_env.sh` (usually /usr/local/Ascend/ascend-toolkit/set_env.sh) before "
    "starting, so that LD_LIBRARY_PATH has its lib64; without an NPU, `python -m alltoallv run --emulate-npu`";

void* open_library(const std::string& name) {
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL)) return handle;
    const char* reason = dlerror();
    throw backend_unavailable(5019, "backend 'hccl' needs the library ", name,
                              ", which cannot be loaded: ", (reason != nullptr ? reason : "no reason given"), "; ",
                              cann_advice);
}

/// The libraries that may have the functions of one list, opened in this order.
struct Libraries {
    std::vector<std::pair<std::string, void*>> opened;

    template <class Function>
    void find(const char* name, bool required, Function& function) const {
        std::string names;
        for (const auto& [library, handle] : opened) {
            function = reinterpret_cast<Function>(dlsym(handle, name));
            if (function != nullptr) return;
            names += (names.empty() ? "" : " nor in ") + library;
        }
        if (!required) return;
        throw backend_unavailable(5020, "backend 'hccl' needs the function ", name, ", which is not in ", names, "; ",
                                  cann_advice);
    }
};

HcclLibrary load() {
    const Libraries ascendcl{{{"libascendcl.so", open_library("libascendcl.so")}}};
    Libraries hccl{{{"libhccl.so", open_library("libhccl.so")}}};
    // CANN 9 has some of HCCL's functions here; in older releases there is no such library.
    constexpr const char* hcomm = "libhcomm.so";
    if (void* handle = dlopen(hcomm, RTLD_NOW | RTLD_GLOBAL)) hccl.opened.emplace_back(hcomm, handle);
    HcclLibrary functions;
#define ALLTOALLV_FIND(library, name) library.find(#name, true, functions.name);
    ALLTOALLV_CANN_REQUIRED(ALLTOALLV_FIND)
#undef ALLTOALLV_FIND
#define ALLTOALLV_FIND(library, name) library.find(#name, false, functions.name);
    ALLTOALLV_CANN_OPTIONAL(ALLTOALLV_FIND)
#undef ALLTOALLV_FIND
    return functions;
}

}  // namespace

const HcclLibrary& cann() {
    static std::mutex mutex;
    static const HcclLibrary* loaded = nullptr;  // never freed: the libraries are in use until the process ends
    const std::lock_guard lock(mutex);
    if (loaded == nullptr) loaded = new HcclLibrary(load());
    return *loaded;
}

}  // namespace alltoallv
