// The emulator's part of libcust_opapi.so: kernels as tasks of emulated streams, run by their twin.
#include "runtime/aclnn/platform.h"

#include <array>
#include <cstring>
#include <vector>

#include "op_kernel/ascendc/quantized_tiling.h"
#include "op_kernel/ascendc/twin/kernels.h"
#include "quant_all_reduce/plan.h"
#include "runtime/failure.h"
#include "runtime/memory.h"
#include "runtime/stream.h"

namespace alltoallv::aclnn {
namespace {

constexpr uint32_t vector_cores = 4;                        // each is a thread
constexpr int acl_error_rt_vector_core_exception = 507035;  // as a device reports a kernel that does what it must not

struct Argument {
    const char* name;
    const void* address;
    size_t bytes;
};

/// Enqueues a kernel on these ranges of device memory, with its tiling behind them.
template <class Tiling>
void enqueue(const char* kernel, uint32_t cores, const std::vector<Argument>& arguments, const Tiling& numbers,
             void* tiling, aclrtStream stream) {
    static_assert(sizeof(Tiling) <= tiling_bytes);
    std::vector<void*> addresses;
    for (const Argument& argument : arguments) {
        emulator::check_device_range(argument.name, argument.address, argument.bytes);
        addresses.push_back(const_cast<void*>(argument.address));
    }
    emulator::check_device_range("workspace", tiling, sizeof numbers);
    addresses.push_back(tiling);
    emulator::stream_of(stream)->enqueue([=] {
        return emulator::guarded(kernel, [&] {
            std::memcpy(tiling, &numbers, sizeof numbers);
            std::array<char, 1000> fault{};
            if (alltoallv_twin_run(kernel, cores, addresses.data(), addresses.size(), 0, 0, fault.data(), fault.size()))
                throw emulator::Failure(acl_error_rt_vector_core_exception, fault.data());
        });
    });
}

}  // namespace

aclnnStatus report(const char* function, aclnnStatus status, const std::string& message) {
    return emulator::report(function, status, message);
}

void quantize(aclDataType dtype, const void* x, int64_t count, int64_t group_size, void* codes, void* scales,
              void* tiling, aclrtStream stream) {
    if (count == 0) return;
    alltoallv_kernels::QuantizeTiling numbers{};
    numbers.count = static_cast<uint64_t>(count);
    numbers.group = static_cast<uint64_t>(group_size);
    numbers.type = static_cast<uint32_t>(dtype);
    const uint64_t groups = (numbers.count + numbers.group - 1) / numbers.group;
    const std::vector<Argument> arguments = {{"x", x, numbers.count * aclDataTypeSize(dtype)},
                                             {"codes", codes, numbers.count},
                                             {"scales", scales, groups * sizeof(float)}};
    enqueue("alltoallv_quantize", cores_for_groups(numbers.count, numbers.group, vector_cores), arguments, numbers,
            tiling, stream);
}

void dequantize_sum(const void* codes, const void* scales, int64_t ranks, int64_t count, int64_t group_size,
                    aclDataType dtype, void* out, void* tiling, aclrtStream stream) {
    if (count == 0) return;
    alltoallv_kernels::DequantizeSumTiling numbers{};
    numbers.count = static_cast<uint64_t>(count);
    numbers.group = static_cast<uint64_t>(group_size);
    numbers.ranks = static_cast<uint32_t>(ranks);
    numbers.type = static_cast<uint32_t>(dtype);
    numbers.saturate = 1;
    const uint64_t groups = (numbers.count + numbers.group - 1) / numbers.group;
    const std::vector<Argument> arguments = {{"codes", codes, numbers.ranks * numbers.count},
                                             {"scales", scales, numbers.ranks * groups * sizeof(float)},
                                             {"out", out, numbers.count * aclDataTypeSize(dtype)}};
    enqueue("alltoallv_dequantize_sum", cores_for_groups(numbers.count, numbers.group, vector_cores), arguments,
            numbers, tiling, stream);
}

}  // namespace alltoallv::aclnn
