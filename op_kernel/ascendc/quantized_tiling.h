// What the host tells the kernels of the quantized pipeline. Types are ACL's numbers: 0 float32, 1 float16, 27
// bfloat16.
#pragma once

#include <cstdint>

#include "window.h"

namespace alltoallv_kernels {

/// x: count elements of `type`; codes: `bits` each, 8 or 4 (group_codes.h); scales: float32, one for each `group`
/// elements.
struct QuantizeTiling {
    uint64_t count, group;
    uint32_t type, bits;
};

/// codes: of each rank, of `bits` each; scales: float32 [ranks, groups]; output: count elements of `type`.
struct DequantizeSumTiling {
    uint64_t count, group;
    uint32_t ranks, type;
    uint32_t saturate, average;
    uint32_t bits, unused;
};

/// x: int8 [ranks, count]; scale: [channels] of `scale_type`; output: count elements of `type`. Element i has the scale
/// i % channels.
struct SharedScaleTiling {
    uint64_t count, channels;
    uint32_t ranks, type;
    uint32_t scale_type, saturate;
};

/// The whole pipeline between ranks. With `group` the input is of `type` and each rank has scales of its own; without,
/// it is int8, and scale and offset are common; `bits` are a code's then, 8, and 8 or 4 with groups.
struct QuantAllReduceTiling {
    WindowTiling window;
    uint64_t count, group, channels;
    uint32_t type, output_type;
    uint32_t scale_type, saturate;
    uint32_t average, bits;
};

/// The elements of one rank's smallest share of a round: those with one scale, or 32 that share theirs with all.
constexpr uint64_t unit_of(uint64_t group) {
    return group > 0 ? group : 32;
}

/// True if a round fits into a lane's half of a window: codes, scales and results of a unit for each rank.
constexpr bool fits_window(uint64_t group, uint64_t output_bytes, uint64_t lane_bytes, uint64_t ranks) {
    return unit_of(group) <= lane_bytes && lane_bytes > 2048 &&
           unit_of(group) * (1 + output_bytes) + sizeof(float) < (lane_bytes - 2048) / ranks;
}

}  // namespace alltoallv_kernels
