// Converts float16 and bfloat16 to float32 and back, in integer arithmetic that every compiler vectorizes.
//
// The bits are the same on every machine, also in flush-to-zero mode: round half to even, subnormals kept, overflow to
// inf, NaN stays NaN with its sign and the upper bits of its payload (narrowing makes it quiet).
#pragma once

#include <cstdint>

#include "op_kernel/cpu/elements.h"

namespace alltoallv::kernel {

/// Exact; also keeps a signaling NaN.
ALLTOALLV_INLINE float bfloat16_to_float(uint16_t value) {
    return from_bits(static_cast<uint32_t>(value) << 16);
}

ALLTOALLV_INLINE uint16_t float_to_bfloat16(float value) {
    const auto bits = bits_of(value);
    const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    const uint32_t nan = bits | 0x00400000u;
    return static_cast<uint16_t>(if_greater(magnitude_of(value), 0x7F800000u, nan, rounded) >> 16);
}

/// Exact; NaN becomes quiet.
ALLTOALLV_INLINE float float16_to_float(uint16_t value) {
    const uint32_t magnitude = value & 0x7FFFu;
    const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
    // Exponent bias 15 becomes 127; inf and NaN get exponent 255.
    const uint32_t special = if_greater(magnitude, 0x7BFFu, 112u << 23, 0u);
    const uint32_t quiet = if_greater(magnitude, 0x7C00u, 0x00400000u, 0u);
    const uint32_t normal = ((magnitude << 13) + (112u << 23) + special) | quiet;
    // A subnormal counts units of 2^-24, the last place of the mantissa in 0.5 <= x < 1.
    const float counted = from_bits(magnitude | (126u << 23)) - 0.5f;
    const auto subnormal = bits_of(counted);
    return from_bits(sign | if_greater(magnitude, 0x03FFu, normal, subnormal));
}

ALLTOALLV_INLINE uint16_t float_to_float16(float value) {
    const auto bits = bits_of(value);
    const uint32_t magnitude = magnitude_of(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t normal = (magnitude - (112u << 23) + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 the addition of 0.5 rounds to units of 2^-24, half to even.
    const float counted = from_bits(magnitude) + 0.5f;
    const uint32_t subnormal = bits_of(counted) - (126u << 23);
    const uint32_t finite = if_greater(magnitude, 0x387FFFFFu, normal, subnormal);  // from 2^-14
    const uint32_t nan = 0x7E00u | ((magnitude >> 13) & 0x03FFu);
    const uint32_t infinite = if_greater(magnitude, 0x7F800000u, nan, 0x7C00u);
    return static_cast<uint16_t>(sign | if_greater(magnitude, 0x477FEFFFu, infinite, finite));  // from 65520
}

}  // namespace alltoallv::kernel
