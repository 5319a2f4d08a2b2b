/// \file elements.h
/// \brief Codes that are small floats, one per byte, and scales of one byte.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/code_format.h"
#include "op_kernel/cpu/clones.h"
#include "op_kernel/cpu/quantize_blocks.h"

namespace alltoallv::kernel::quant {

/// Calls on up to a block of elements, in groups that begin at the first.
struct Elements {
    /// codes[k] = x * its group's inverse, half to even, saturated; x below 2^-126 counts as 0.
    using Encode = void (*)(const void* x, size_t count, size_t group_size, const float* inverses, Bytes* codes);
    /// out[k] = code * its group's scale; with `adds` that is added to what is there.
    using Multiply = void (*)(const void* codes, size_t count, size_t group_size, const float* scales, bool adds,
                              float* out);
    Encode encode;
    Multiply multiply;
};
/// Of a format whose codes are floats.
Elements elements(CodeFormat format, Isa isa);

/// Scales and inverses of groups by their largest magnitudes, as bits. Inverses are 0 where codes do not depend on
/// them.
void scales_of_floats(CodeFormat format, const uint32_t* magnitudes, size_t groups, float* scales, float* inverses,
                      Isa isa);
/// The same with the bytes that say the scales. `tensor` is the scale of all in NVFP4.
void scales_of_bytes(CodeFormat format, const uint32_t* magnitudes, size_t groups, float tensor, float* scales,
                     float* inverses, Bytes* bytes);
/// What those bytes say.
void scales_from_bytes(CodeFormat format, const Bytes* bytes, size_t groups, float tensor, float* scales);

}  // namespace alltoallv::kernel::quant
