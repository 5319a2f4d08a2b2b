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

constexpr uint32_t vector_cores = 4;         // each is a thread
constexpr uint32_t communicating_cores = 2;  // on every rank, and there may be many
constexpr uint64_t status_bytes = communicating_cores * alltoallv_kernels::status_words * sizeof(int32_t);
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
    numbers.bits = 8;
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
    numbers.bits = 8;
    const uint64_t groups = (numbers.count + numbers.group - 1) / numbers.group;
    const std::vector<Argument> arguments = {{"codes", codes, numbers.ranks * numbers.count},
                                             {"scales", scales, numbers.ranks * groups * sizeof(float)},
                                             {"out", out, numbers.count * aclDataTypeSize(dtype)}};
    enqueue("alltoallv_dequantize_sum", cores_for_groups(numbers.count, numbers.group, vector_cores), arguments,
            numbers, tiling, stream);
}

uint32_t lanes() {
    return communicating_cores;
}

void all_to_all_v(const alltoallv_kernels::AllToAllVTiling& numbers, const void* x, const void* send_counts,
                  const void* sdispls, void* out, void* recv_counts, void* status, void* tiling, aclrtStream stream) {
    const uint64_t counts = numbers.window.size * sizeof(int64_t);
    const std::vector<Argument> arguments = {{"x", x, numbers.input_rows * numbers.row_bytes},
                                             {"sendCounts", send_counts, counts},
                                             {"sdispls", sdispls, sdispls == nullptr ? 0 : counts},
                                             {"out", out, numbers.output_rows * numbers.row_bytes},
                                             {"recvCounts", recv_counts, counts},
                                             {"status", status, status_bytes}};
    enqueue("alltoallv_all_to_all_v", communicating_cores, arguments, numbers, tiling, stream);
}

void quant_all_reduce(const alltoallv_kernels::QuantAllReduceTiling& numbers, const void* x, const void* scale,
                      const void* offset, void* out, void* status, void* tiling, aclrtStream stream) {
    const size_t each = scale == nullptr ? 0 : aclDataTypeSize(static_cast<aclDataType>(numbers.scale_type));
    const std::vector<Argument> arguments = {
        {"x", x, numbers.count * aclDataTypeSize(static_cast<aclDataType>(numbers.type))},
        {"scale", scale, numbers.channels * each},
        {"offset", offset, each},
        {"out", out, numbers.count * aclDataTypeSize(static_cast<aclDataType>(numbers.output_type))},
        {"status", status, status_bytes}};
    const char* name = "alltoallv_quant_all_reduce";
    enqueue(name, communicating_cores, arguments, numbers, tiling, stream);
    emulator::stream_of(stream)->enqueue([=] {
        return emulator::guarded(name, [&] {
            const auto* words = static_cast<const int32_t*>(status);
            if (words[0] == 0) return;
            throw emulator::Failure(acl_error_rt_vector_core_exception, "ends with status ", words[0], " of rank ",
                                    words[1], " in round ", words[2]);
        });
    });
}

}  // namespace alltoallv::aclnn
