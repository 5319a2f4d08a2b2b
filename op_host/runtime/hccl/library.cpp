#include "runtime/hccl/library.h"

#include <dlfcn.h>

#include <mutex>
#include <string>

#include "runtime/base/error.h"

namespace alltoallv {
namespace {

constexpr const char* cann_advice =
    "install CANN and run `source <CANN>/set_env.sh` (usually /usr/local/Ascend/ascend-toolkit/set_env.sh) before "
    "starting, so that LD_LIBRARY_PATH has its lib64; without an NPU, `python -m alltoallv run --emulate-npu`";

void* open_library(const std::string& name) {
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL)) return handle;
    const char* reason = dlerror();
    throw backend_unavailable("backend 'hccl' needs the library ", name,
                              ", which cannot be loaded: ", (reason != nullptr ? reason : "no reason given"), "; ",
                              cann_advice);
}

template <class Function>
void find(void* handle, const std::string& library, const char* name, bool required, Function& function) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    if (function != nullptr || !required) return;
    throw backend_unavailable("backend 'hccl' needs the function ", name, ", which ", library,
                              " does not have: expected CANN 8.0 or later; ", cann_advice);
}

HcclLibrary load() {
    const std::string ascendcl_name = "libascendcl.so", hccl_name = "libhccl.so";
    void* const ascendcl = open_library(ascendcl_name);
    void* const hccl = open_library(hccl_name);
    HcclLibrary functions;
#define ALLTOALLV_FIND(library, name) find(library, library##_name, #name, true, functions.name);
    ALLTOALLV_CANN_REQUIRED(ALLTOALLV_FIND)
#undef ALLTOALLV_FIND
#define ALLTOALLV_FIND(library, name) find(library, library##_name, #name, false, functions.name);
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
