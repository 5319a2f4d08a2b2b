// Computes scales of groups, as numbers and as bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "op_kernel/cpu/clones.h"
#include "op_kernel/cpu/quantize_blocks.h"
#include "runtime/base/code_format.h"

namespace alltoallv::kernel::quant {

constexpr uint32_t least_normal = 1u << 23;   // 2^-126: smaller values count as 0
constexpr float largest_inverted = 0x1p126f;  // scales are at most this; only codes below 4 bits saturate then

/// Computes scales and inverses of groups by their largest magnitudes, as bits. Inverses are 0 if codes do not depend
/// on them.
void scales_of_floats(CodeFormat format, const uint32_t* magnitudes, size_t groups, float* scales, float* inverses,
                      Isa isa);
/// Does the same, and returns the bytes that encode the scales. `tensor` is NVFP4's scale of all groups.
void scales_of_bytes(CodeFormat format, const uint32_t* magnitudes, size_t groups, float tensor, float* scales,
                     float* inverses, Bytes* bytes);
/// Computes the scales that those bytes encode.
void scales_from_bytes(CodeFormat format, const Bytes* bytes, size_t groups, float tensor, float* scales);

}  // namespace alltoallv::kernel::quant
