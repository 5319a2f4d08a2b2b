// How the local kernels of the quantized pipeline divide their work: plain numbers. Types are ACL's numbers, which are
// also for CANN's graphs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "op_kernel/ascendc/quantized_tiling.h"

namespace alltoallv {

/// What a kernel is told, and on how many cores it runs.
template <class Tiling>
struct Plan {
    Tiling tiling;
    uint32_t cores;
};

/// Whole groups are divided among cores; more cores than groups would have nothing to do. At least 1.
constexpr uint32_t cores_for_groups(uint64_t count, uint64_t group, uint32_t cores) {
    const uint64_t groups = count / group + (count % group != 0);
    return static_cast<uint32_t>(std::clamp<uint64_t>(groups, 1, std::max<uint32_t>(cores, 1)));
}

/// Bytes of the codes of `count` elements: groups begin at bytes.
constexpr uint64_t code_bytes_of(uint64_t count, uint64_t group, uint32_t bits) {
    return bits == 8 ? count : count / group * ((group + 1) / 2) + (count % group + 1) / 2;
}

constexpr Plan<alltoallv_kernels::QuantizeTiling> plan_quantize(uint64_t count, uint64_t group, uint32_t type,
                                                                uint32_t bits, uint32_t cores) {
    return {{count, group, type, bits}, cores_for_groups(count, group, cores)};
}

constexpr Plan<alltoallv_kernels::DequantizeSumTiling> plan_dequantize_sum(uint32_t ranks, uint64_t count,
                                                                           uint64_t group, uint32_t type, uint32_t bits,
                                                                           bool saturate, bool average,
                                                                           uint32_t cores) {
    return {{count, group, ranks, type, saturate, average, bits, 0}, cores_for_groups(count, group, cores)};
}

/// Cores take blocks of 32 elements.
constexpr Plan<alltoallv_kernels::SharedScaleTiling> plan_shared_scale_sum(uint32_t ranks, uint64_t count,
                                                                           uint64_t channels, uint32_t type,
                                                                           uint32_t scale_type, bool saturate,
                                                                           uint32_t cores) {
    return {{count, channels, ranks, type, scale_type, saturate}, cores_for_groups(count, 32, cores)};
}

}  // namespace alltoallv
