// Accesses elements at any alignment, and the bits of float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "op_kernel/cpu/clones.h"

namespace alltoallv::kernel {

using Bytes = unsigned char;

// memcpy allows any alignment and any declared type of the caller's memory, and still vectorizes.

template <class T>
ALLTOALLV_INLINE T load(const void* from, size_t k) {
    T value;
    std::memcpy(&value, static_cast<const Bytes*>(from) + k * sizeof(T), sizeof(T));
    return value;
}

template <class T>
ALLTOALLV_INLINE void store(void* to, size_t k, T value) {
    std::memcpy(static_cast<Bytes*>(to) + k * sizeof(T), &value, sizeof(T));
}

ALLTOALLV_INLINE constexpr uint32_t bits_of(float value) {
    return __builtin_bit_cast(uint32_t, value);
}
ALLTOALLV_INLINE constexpr float from_bits(uint32_t bits) {
    return __builtin_bit_cast(float, bits);
}
ALLTOALLV_INLINE uint32_t magnitude_of(float value) {
    return bits_of(value) & 0x7FFFFFFFu;
}

/// Makes every NaN the same one: which of two an addition returns, and the sign of a new one, depend on the processor
/// and on operand order.
template <class T>
ALLTOALLV_INLINE T canonical_nan(T value) {
    if constexpr (std::is_floating_point_v<T>) return value != value ? static_cast<T>(__builtin_nan("")) : value;
    return value;
}

/// Returns `a > b ? x : y` for a, b < 2^31 without a branch, into which a compiler would move work that it then cannot
/// vectorize. The comparison is signed, because the first vector instructions have no other.
ALLTOALLV_INLINE constexpr uint32_t if_greater(uint32_t a, uint32_t b, uint32_t x, uint32_t y) {
    const uint32_t mask = 0u - static_cast<uint32_t>(static_cast<int32_t>(a) > static_cast<int32_t>(b));
    return (x & mask) | (y & ~mask);
}

}  // namespace alltoallv::kernel
