/// \file small_floats.h
/// \brief Floats of 8 and 4 bits to float32 and back, in integer arithmetic that every compiler vectorizes.
#pragma once

#include <cstdint>

#include "op_kernel/cpu/half.h"
#include "op_kernel/cpu/quantize_blocks.h"

namespace alltoallv::kernel::quant {

/// A float of `width` bits with `mantissa` of them behind the point, by the bits of float32.
template <int width, int mantissa, int bias, uint32_t most_code>
struct Small {
    static constexpr int shift = 23 - mantissa;
    static constexpr uint32_t rebias = static_cast<uint32_t>(127 - bias) << 23;
    static constexpr uint32_t most = (most_code << shift) + rebias;
    static constexpr uint32_t least_normal = rebias + (1u << 23);
    static constexpr uint32_t magnitude_mask = (1u << (width - 1)) - 1;
    /// The last place of this is the least subnormal: adding it rounds to units of that, half to even.
    static constexpr uint32_t rounder = static_cast<uint32_t>(127 + 24 - bias - mantissa) << 23;
    static constexpr uint32_t unit = static_cast<uint32_t>(127 + 1 - bias - mantissa) << 23;

    ALLTOALLV_INLINE static uint32_t encode(float value) {
        const uint32_t bits = bits_of(value);
        const uint32_t wanted = bits & 0x7FFFFFFFu;
        const uint32_t x = if_greater(wanted, most, most, wanted);
        const uint32_t normal = (x - rebias + (1u << (shift - 1)) - 1 + (x >> shift & 1u)) >> shift;
        const uint32_t subnormal = bits_of(from_bits(x) + from_bits(rounder)) - rounder;
        return if_greater(least_normal, x, subnormal, normal) | bits >> 31 << (width - 1);
    }

    ALLTOALLV_INLINE static float decode(uint32_t code) {
        const uint32_t magnitude = code & magnitude_mask;
        const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * from_bits(unit));
        uint32_t bits = if_greater(magnitude, (1u << mantissa) - 1, (magnitude << shift) + rebias, subnormal);
        if constexpr (width == 8) {  // inf of e5m2, and NaN
            constexpr uint32_t infinity = mantissa == 2 ? most_code + 1 : 0;
            bits = if_greater(magnitude, most_code, if_greater(magnitude, infinity, nan_bits, infinity_bits), bits);
        }
        return from_bits(bits | (code >> (width - 1) & 1u) << 31);
    }
};
using E4M3 = Small<8, 3, 7, 0x7E>;
using E5M2 = Small<8, 2, 15, 0x7B>;
using E2M1 = Small<4, 1, 1, 7>;

}  // namespace alltoallv::kernel::quant
