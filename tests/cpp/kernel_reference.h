// What the kernel tests share: EXPECT, random bits, and the half formats computed from their definition.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>

#include "op_kernel/cpu/half.h"
#include "runtime/base/dtype.h"

namespace kernel_reference {

inline int failures = 0;

/// Counts a failure and goes on; the first 20 are printed, with what a format and its arguments say.
#define EXPECT(condition, ...)                                                   \
    do {                                                                         \
        if (!(condition) && ++kernel_reference::failures <= 20) {                \
            std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            std::fprintf(stderr, __VA_ARGS__);                                   \
            std::fputc('\n', stderr);                                            \
        }                                                                        \
    } while (false)

inline std::mt19937 random_bits(20240611);
inline size_t random_below(size_t n) {
    return random_bits() % n;
}

/// For `return` from main.
inline int report(const char* what) {
    if (failures == 0) std::printf("%s: all checks passed\n", what);
    if (failures != 0) std::fprintf(stderr, "%s: %d checks failed\n", what, failures);
    return failures == 0 ? 0 : 1;
}

struct HalfFormat {
    int mantissa_bits, bias;
};
inline constexpr HalfFormat f16{10, 15}, bf16{7, 127};

inline double decode(uint16_t value, HalfFormat format) {
    const int mantissa = value & ((1 << format.mantissa_bits) - 1);
    const int exponent = (value & 0x7FFF) >> format.mantissa_bits;
    double magnitude = std::ldexp(mantissa + (exponent > 0 ? 1 << format.mantissa_bits : 0),
                                  std::max(exponent, 1) - format.bias - format.mantissa_bits);
    if (exponent == 2 * format.bias + 1) {
        magnitude = mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : HUGE_VAL;
    }
    return (value & 0x8000) != 0 ? -magnitude : magnitude;
}

/// Nearest value, ties to even; NaN gives the positive quiet NaN.
inline uint16_t encode(double value, HalfFormat format) {
    const int infinity = (2 * format.bias + 1) << format.mantissa_bits;
    if (std::isnan(value)) return static_cast<uint16_t>(infinity | 1 << (format.mantissa_bits - 1));
    const int sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (std::isinf(magnitude)) return static_cast<uint16_t>(sign | infinity);
    const int exponent = std::max(magnitude == 0 ? -9999 : std::ilogb(magnitude), 1 - format.bias);
    const double units = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
    const int bits = static_cast<int>(units) + ((exponent + format.bias - 1) << format.mantissa_bits);
    return static_cast<uint16_t>(sign | std::min(bits, infinity));
}

// The conversions of the kernels, by dtype: float16, bfloat16, and for `put` and `get` float32.

inline float widen(alltoallv::DType dtype, uint16_t half) {
    return dtype == alltoallv::DType::float16 ? alltoallv::kernel::float16_to_float(half)
                                              : alltoallv::kernel::bfloat16_to_float(half);
}

inline uint16_t narrow(alltoallv::DType dtype, float value) {
    return dtype == alltoallv::DType::float16 ? alltoallv::kernel::float_to_float16(value)
                                              : alltoallv::kernel::float_to_bfloat16(value);
}

inline void put(alltoallv::DType dtype, unsigned char* to, size_t k, float value) {
    if (dtype == alltoallv::DType::float32) {
        std::memcpy(to + 4 * k, &value, 4);
        return;
    }
    const uint16_t half = narrow(dtype, value);
    std::memcpy(to + 2 * k, &half, 2);
}

inline float get(alltoallv::DType dtype, const unsigned char* from, size_t k) {
    if (dtype == alltoallv::DType::float32) {
        float value;
        std::memcpy(&value, from + 4 * k, 4);
        return value;
    }
    uint16_t half;
    std::memcpy(&half, from + 2 * k, 2);
    return widen(dtype, half);
}

}  // namespace kernel_reference
