// The device's part of libcust_opapi.so. Never compiled against CANN, never run on a device.
#include "runtime/aclnn/platform.h"

#include <cstdio>
#include <memory>

#include "op_kernel/ascendc/quantized_tiling.h"
#include "quant_all_reduce/plan.h"
#include "runtime/aclnn/call.h"
#include "runtime/device/launch.h"

// Of CANN's acl_rt.h, whose enumerator is an int here.
extern "C" aclError aclrtGetDeviceInfo(uint32_t deviceId, int attr, int64_t* value);

namespace alltoallv::aclnn {
namespace {

constexpr int vector_core_count = 201;  // ACL_DEV_ATTR_VECTOR_CORE_NUM

uint32_t vector_cores() {
    int32_t device = 0;
    int64_t cores = 0;
    require_success("aclrtGetDevice", aclrtGetDevice(&device));
    require_success("aclrtGetDeviceInfo", aclrtGetDeviceInfo(static_cast<uint32_t>(device), vector_core_count, &cores));
    return static_cast<uint32_t>(cores);
}

/// Puts a tiling into device memory on the stream, from a copy that lives until the stream has read it.
template <class Tiling>
void send(const Tiling& tiling, void* device, aclrtStream stream) {
    static_assert(sizeof(Tiling) <= tiling_bytes);
    auto copy = std::make_shared<const Tiling>(tiling);
    require_success("aclrtMemcpyAsync", aclrtMemcpyAsync(device, sizeof tiling, copy.get(), sizeof tiling,
                                                         ACL_MEMCPY_HOST_TO_DEVICE, stream));
    keep_until_done(stream, std::move(copy));
}

}  // namespace

aclnnStatus report(const char* function, aclnnStatus status, const std::string& message) {
    std::fprintf(stderr, "%s: %s (%d)\n", function, message.c_str(), status);
    return status;
}

void quantize(aclDataType dtype, const void* x, int64_t count, int64_t group_size, void* codes, void* scales,
              void* tiling, aclrtStream stream) {
    alltoallv_kernels::QuantizeTiling numbers{};
    numbers.count = static_cast<uint64_t>(count);
    numbers.group = static_cast<uint64_t>(group_size);
    numbers.type = static_cast<uint32_t>(dtype);
    numbers.bits = 8;
    if (count == 0) return;
    send(numbers, tiling, stream);
    alltoallv_launch_quantize(cores_for_groups(numbers.count, numbers.group, vector_cores()), stream, x, codes, scales,
                              tiling);
}

void dequantize_sum(const void* codes, const void* scales, int64_t ranks, int64_t count, int64_t group_size,
                    aclDataType dtype, void* out, void* tiling, aclrtStream stream) {
    alltoallv_kernels::DequantizeSumTiling numbers{};
    numbers.count = static_cast<uint64_t>(count);
    numbers.group = static_cast<uint64_t>(group_size);
    numbers.ranks = static_cast<uint32_t>(ranks);
    numbers.type = static_cast<uint32_t>(dtype);
    numbers.bits = 8;
    numbers.saturate = 1;
    if (count == 0) return;
    send(numbers, tiling, stream);
    alltoallv_launch_dequantize_sum(cores_for_groups(numbers.count, numbers.group, vector_cores()), stream, codes,
                                    scales, out, tiling);
}

uint32_t lanes() {
    const uint32_t cores = vector_cores();
    return cores < alltoallv_kernels::most_lanes ? cores : alltoallv_kernels::most_lanes;
}

void all_to_all_v(const alltoallv_kernels::AllToAllVTiling& numbers, const void* x, const void* send_counts,
                  const void* sdispls, void* out, void* recv_counts, void* status, void* tiling, aclrtStream stream) {
    send(numbers, tiling, stream);
    alltoallv_launch_all_to_all_v(numbers.window.lanes, stream, x, send_counts, sdispls, out, recv_counts, status,
                                  tiling);
}

/// A device's stream cannot be made to fail by what a kernel has found: whoever wants to know looks at the status.
void quant_all_reduce(const alltoallv_kernels::QuantAllReduceTiling& numbers, const void* x, const void* scale,
                      const void* offset, void* out, void* status, void* tiling, aclrtStream stream) {
    send(numbers, tiling, stream);
    alltoallv_launch_quant_all_reduce(numbers.window.lanes, stream, x, scale, offset, out, status, tiling);
}

}  // namespace alltoallv::aclnn
