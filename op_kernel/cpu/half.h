// float16 and bfloat16 to float32 and back, in integer arithmetic that every compiler vectorizes.
//
// Same bits on every machine, also in flush-to-zero mode: round half to even, subnormals kept, overflow to inf, NaN
// stays NaN with its sign and the upper bits of its payload (narrowing makes it quiet).
#pragma once

#include <cstdint>

#include "op_kernel/cpu/clones.h"

namespace alltoallv::kernel {

/// `a > b ? x : y` for a, b < 2^31 without a branch, into which a compiler would move work that it then cannot
/// vectorize; signed, since the first vector instructions compare nothing else.
ALLTOALLV_INLINE uint32_t if_greater(uint32_t a, uint32_t b, uint32_t x, uint32_t y) {
    const uint32_t mask = 0u - static_cast<uint32_t>(static_cast<int32_t>(a) > static_cast<int32_t>(b));
    return (x & mask) | (y & ~mask);
}

/// Exact; also keeps a signaling NaN as it is.
ALLTOALLV_INLINE float bfloat16_to_float(uint16_t value) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(value) << 16);
}

ALLTOALLV_INLINE uint16_t float_to_bfloat16(float value) {
    const auto bits = __builtin_bit_cast(uint32_t, value);
    const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    const uint32_t nan = bits | 0x00400000u;
    return static_cast<uint16_t>(if_greater(bits & 0x7FFFFFFFu, 0x7F800000u, nan, rounded) >> 16);
}

/// Exact; NaN becomes quiet.
ALLTOALLV_INLINE float float16_to_float(uint16_t value) {
    const uint32_t magnitude = value & 0x7FFFu;
    const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
    // Exponent bias 15 becomes 127; inf and NaN go on to exponent 255.
    const uint32_t special = if_greater(magnitude, 0x7BFFu, 112u << 23, 0u);
    const uint32_t quiet = if_greater(magnitude, 0x7C00u, 0x00400000u, 0u);
    const uint32_t normal = ((magnitude << 13) + (112u << 23) + special) | quiet;
    // A subnormal counts units of 2^-24, the last place of the mantissa in 0.5 <= x < 1.
    const float counted = __builtin_bit_cast(float, magnitude | (126u << 23)) - 0.5f;
    const auto subnormal = __builtin_bit_cast(uint32_t, counted);
    return __builtin_bit_cast(float, sign | if_greater(magnitude, 0x03FFu, normal, subnormal));
}

ALLTOALLV_INLINE uint16_t float_to_float16(float value) {
    const auto bits = __builtin_bit_cast(uint32_t, value);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t normal = (magnitude - (112u << 23) + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 the addition of 0.5 rounds to units of 2^-24, half to even.
    const float counted = __builtin_bit_cast(float, magnitude) + 0.5f;
    const uint32_t subnormal = __builtin_bit_cast(uint32_t, counted) - (126u << 23);
    const uint32_t finite = if_greater(magnitude, 0x387FFFFFu, normal, subnormal);  // from 2^-14
    const uint32_t nan = 0x7E00u | ((magnitude >> 13) & 0x03FFu);
    const uint32_t infinite = if_greater(magnitude, 0x7F800000u, nan, 0x7C00u);
    return static_cast<uint16_t>(sign | if_greater(magnitude, 0x477FEFFFu, infinite, finite));  // from 65520
}

}  // namespace alltoallv::kernel
