// The values of codes: converts to float32 and back, in integer arithmetic that every compiler vectorizes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "op_kernel/cpu/half.h"
#include "op_kernel/cpu/quantize_blocks.h"

namespace alltoallv::kernel::quant {

/// int8, or int4 in its own byte.
struct Integer {
    static constexpr bool integer = true;
    static constexpr float unit = 1;
    static constexpr uint32_t most_scale = ((127u + 121) << 23) - 1;  ///< its products with codes are finite

    static bool flushes(float) { return false; }
    static bool plain(const void*, size_t) { return true; }
    ALLTOALLV_INLINE static Bytes encode(float value) { return static_cast<Bytes>(round_code(value)); }
    ALLTOALLV_INLINE static float decode(uint32_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
};

/// A float of `width` bits, `mantissa` of them in its fraction, computed by the bits of float32.
template <int width, int mantissa, int bias, uint32_t largest_code>
struct Small {
    static constexpr bool integer = false;
    static constexpr uint32_t most_code = largest_code;
    static constexpr int shift = 23 - mantissa;
    static constexpr uint32_t rebias = static_cast<uint32_t>(127 - bias) << 23;
    static constexpr uint32_t most = (largest_code << shift) + rebias;
    static constexpr uint32_t least_normal = rebias + (1u << 23);
    static constexpr int magnitude_bits = width - 1;
    static constexpr uint32_t magnitude_mask = (1u << magnitude_bits) - 1;
    static constexpr auto sign_mask = static_cast<char>(1u << magnitude_bits);
    static constexpr uint32_t least = static_cast<uint32_t>(127 + 1 - bias - mantissa) << 23;

    /// Shifted by this number of bits, a code is a float16, which counts in this unit.
    static constexpr int half_shift = 10 - mantissa;
    static constexpr auto half_mask = static_cast<int16_t>(0x8000u | magnitude_mask << half_shift);
    static constexpr float unit = static_cast<float>(1 << (15 - bias));
    static constexpr uint32_t most_scale = (111u + 127) << 23;  ///< below it, products with units and codes are finite

    /// In the upper 16 bits of encode()'s sum, the number of bits below the exponent.
    static constexpr int spare = 7 - mantissa;
    /// Times the power of two of a value it is encode()'s rounder, with an even number of units more: so many that they
    /// are the negative of code 0's upper bits, if the lowest 16 bits are a signed number of units.
    static constexpr auto code_0 = ((least_normal >> 16) + (shift << 7)) >> spare;
    static constexpr float rounder = from_bits((127u + shift) << 23 | (0x10000u - code_0));
    static_assert(code_0 % 2 == 0);

    /// True if numbers below 2^-126, which count as 0, would get other codes by this inverse of a scale.
    ALLTOALLV_INLINE static bool flushes(float inverse) {
        return bits_of(inverse) > static_cast<uint32_t>(127 + 126 - bias - mantissa) << 23;
    }

    /// True if no code is inf or NaN.
    ALLTOALLV_INLINE static bool plain(const void* codes, size_t count) {
        Bytes largest = 0;
        for (size_t k = 0; width == 8 && k < count; ++k) {
            const auto magnitude = static_cast<Bytes>(load<Bytes>(codes, k) & magnitude_mask);
            largest = magnitude > largest ? magnitude : largest;
        }
        return largest <= largest_code;
    }

    /// Adds `rounder`, whose last place is the code's, which rounds to that place, half to even.
    ALLTOALLV_INLINE static uint32_t encode(float value) {
        const uint32_t bits = bits_of(value);
        const uint32_t wanted = bits & 0x7FFFFFFFu;
        const uint32_t x = if_greater(wanted, most, most, wanted);
        const uint32_t power = x & infinity_bits;
        const uint32_t step = if_greater(least_normal, power, least_normal, power);
        const uint32_t rounder = step + (static_cast<uint32_t>(shift) << 23);
        const uint32_t units = bits_of(from_bits(x) + from_bits(rounder)) - rounder;
        return (units + ((step - least_normal) >> shift)) | bits >> 31 << (width - 1);
    }

    ALLTOALLV_INLINE static constexpr float decode(uint32_t code) {
        const uint32_t magnitude = code & magnitude_mask;
        const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * from_bits(least));
        uint32_t bits = if_greater(magnitude, (1u << mantissa) - 1, (magnitude << shift) + rebias, subnormal);
        if constexpr (width == 8) {  // inf of e5m2, and NaN
            constexpr uint32_t infinity = mantissa == 2 ? largest_code + 1 : 0;
            bits = if_greater(magnitude, largest_code, if_greater(magnitude, infinity, nan_bits, infinity_bits), bits);
        }
        return from_bits(bits | (code >> (width - 1) & 1u) << 31);
    }
};
using E4M3 = Small<8, 3, 7, 0x7E>;
using E5M2 = Small<8, 2, 15, 0x7B>;
using E3M2 = Small<6, 2, 3, 0x1F>;
using E2M3 = Small<6, 3, 1, 0x1F>;
using E2M1 = Small<4, 1, 1, 7>;

/// Calls `run` with the type of a format's codes.
template <class Run>
auto with_code(CodeFormat format, Run run) {
    const bool is_byte = info(format).bits == 8;
    switch (info(format).mantissa) {
        case -1:
            return run(Integer());
        case 3:
            return is_byte ? run(E4M3()) : run(E2M3());
        case 2:
            return is_byte ? run(E5M2()) : run(E3M2());
        default:
            return run(E2M1());
    }
}

}  // namespace alltoallv::kernel::quant
