#include "op_kernel/ascendc/twin/kernels.h"

#include <cstdio>
#include <exception>
#include <map>

#include "kernel_operator.h"

#define ALLTOALLV_KERNEL_4(name) extern "C" void name(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR);
#define ALLTOALLV_KERNEL_5(name) extern "C" void name(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR);
#define ALLTOALLV_KERNEL_6(name) extern "C" void name(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR);
#define ALLTOALLV_KERNEL_7(name) extern "C" void name(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR);

/// Every kernel, with the number of its arguments.
#define ALLTOALLV_KERNELS(X)         \
    X(4, alltoallv_quantize)         \
    X(4, alltoallv_dequantize_sum)   \
    X(5, alltoallv_shared_scale_sum) \
    X(4, alltoallv_gather_rows)      \
    X(4, alltoallv_scatter_rows)     \
    X(6, alltoallv_quant_all_reduce) \
    X(7, alltoallv_all_to_all_v)

#define ALLTOALLV_DECLARE(n, name) ALLTOALLV_KERNEL_##n(name)
ALLTOALLV_KERNELS(ALLTOALLV_DECLARE)
#undef ALLTOALLV_DECLARE

namespace alltoallv::twin {
namespace {

using Arguments = std::span<void* const>;

GM_ADDR at(Arguments arguments, size_t i) {
    return static_cast<GM_ADDR>(arguments[i]);
}

#define ALLTOALLV_CALL_4(f, a) f(at(a, 0), at(a, 1), at(a, 2), at(a, 3))
#define ALLTOALLV_CALL_5(f, a) f(at(a, 0), at(a, 1), at(a, 2), at(a, 3), at(a, 4))
#define ALLTOALLV_CALL_6(f, a) f(at(a, 0), at(a, 1), at(a, 2), at(a, 3), at(a, 4), at(a, 5))
#define ALLTOALLV_CALL_7(f, a) f(at(a, 0), at(a, 1), at(a, 2), at(a, 3), at(a, 4), at(a, 5), at(a, 6))

struct Kernel {
    size_t arguments;
    void (*run)(Arguments);
};

const std::map<std::string, Kernel>& kernels() {
    static const std::map<std::string, Kernel> all = {
#define ALLTOALLV_ROW(n, name) {#name, {n, [](Arguments a) { ALLTOALLV_CALL_##n(name, a); }}},
        ALLTOALLV_KERNELS(ALLTOALLV_ROW)
#undef ALLTOALLV_ROW
    };
    return all;
}

}  // namespace

void run_kernel(const std::string& name, uint32_t cores, Arguments arguments, const Behaviour& behaviour) {
    const auto found = kernels().find(name);
    if (found == kernels().end()) throw Fault("unknown kernel", "'" + name + "' is not a kernel of this package");
    if (arguments.size() != found->second.arguments)
        throw Fault("arguments", name + " takes " + std::to_string(found->second.arguments) + " arguments, got " +
                                     std::to_string(arguments.size()));
    launch(cores, behaviour, [&] { found->second.run(arguments); });
}

}  // namespace alltoallv::twin

int alltoallv_twin_run(const char* name, unsigned cores, void* const* arguments, size_t count, unsigned long long seed,
                       double mean_delay_us, char* fault, size_t fault_bytes) {
    using namespace alltoallv::twin;
    Behaviour behaviour;
    behaviour.seed = seed;
    behaviour.mean_delay_us = mean_delay_us;
    try {
        run_kernel(name, cores, {arguments, count}, behaviour);
        return 0;
    } catch (const std::exception& error) {
        std::snprintf(fault, fault_bytes, "%s", error.what());
        return 1;
    }
}
