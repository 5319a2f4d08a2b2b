// Helpers of the quantization kernels: rounding to codes, and blocks that stay in cache.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "op_kernel/cpu/elements.h"
#include "op_kernel/cpu/half_blocks.h"
#include "op_kernel/cpu/quantize.h"
#include "runtime/base/dtype.h"
#include "runtime/base/error.h"

/// For lambdas in kernels, after their parameters: an inlined body is compiled for the instruction set of its clone.
#define ALLTOALLV_LAMBDA __attribute__((always_inline))

namespace alltoallv::kernel::quant {

/// Number of elements in a block: a few arrays of float32 that fit the first-level cache. Long groups of codes are
/// packed a block at a time: the number is a part of the layout.
constexpr size_t block = 2048;
constexpr size_t most_groups = block / 16;  // if scales are bytes

constexpr uint32_t infinity_bits = 0x7F800000u;
constexpr uint32_t nan_bits = 0x7FC00000u;  // canonical_nan()

static_assert(std::endian::native == std::endian::little, "codes of 4 bits are packed through 16-bit words");

/// Rounds half to even, for |value| < 2^22; other values give some code, without undefined behaviour. At 1.5 * 2^23 the
/// last place of a float32 is 1, so the addition rounds to an integer and leaves it in the lowest bits.
ALLTOALLV_INLINE int8_t round_code(float value) {
    return static_cast<int8_t>(bits_of(value + 12582912.0f));
}

/// Calls `run` with group_size as a constant if it is a usual one, so that loops over it unroll.
template <class Run>
ALLTOALLV_INLINE void with_group_size(size_t group_size, Run run) {
    switch (group_size) {
        case 16:
            return run(std::integral_constant<size_t, 16>());
        case 32:
            return run(std::integral_constant<size_t, 32>());
        case 64:
            return run(std::integral_constant<size_t, 64>());
        case 128:
            return run(std::integral_constant<size_t, 128>());
        default:
            return run(group_size);
    }
}

/// Calls `run(begin, size, group)` for every group of `count` elements.
template <class Group, class Run>
ALLTOALLV_INLINE void each_group(size_t count, Group group_size, Run run) {
    const size_t whole = count / group_size;
    for (size_t g = 0; g < whole; ++g) run(g * group_size, group_size, g);
    if (whole * group_size < count) run(whole * group_size, count - whole * group_size, whole);
}

/// Computes the largest magnitude of each group, as bits: they are ordered like the values, and NaN is above inf.
ALLTOALLV_INLINE void largest_of_groups(const void* x, size_t count, size_t group_size, uint32_t* out) {
    with_group_size(group_size, [=](auto size) ALLTOALLV_LAMBDA {
        each_group(count, size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
            int32_t most = 0;
            for (size_t k = 0; k < n; ++k) {
                const auto magnitude = static_cast<int32_t>(magnitude_of(load<float>(x, begin + k)));
                most = magnitude > most ? magnitude : most;
            }
            out[g] = static_cast<uint32_t>(most);
        });
    });
}

/// Up to a block of elements: whole groups, or a part of one group.
struct Piece {
    size_t first;       // element
    size_t count;       // elements
    size_t group_size;  // of the groups within; `count` for a part of a group
    size_t group;       // the first one's index
    size_t code;        // byte at which the codes begin
};

/// Returns the group size for packing nibbles: groups of even size leave no half bytes between them.
inline size_t packing_size(const Piece& piece) {
    return piece.group_size % 2 == 0 ? piece.count : piece.group_size;
}

/// Calls `run(piece)` for the parts of group `group`, which is longer than a block.
template <class Run>
void each_part(const QuantFormat& format, size_t count, size_t group, Run run) {
    const size_t begin = group * format.group_size, end = std::min(begin + format.group_size, count);
    const size_t code = format.code_bytes(begin);
    for (size_t part = begin; part < end; part += block) {
        const size_t n = std::min(block, end - part);
        run(Piece{part, n, n, group, code + packed_bytes(format.bits(), part - begin)});
    }
}

/// Calls `run(piece)` for all of `count` elements.
template <class Run>
void each_piece(const QuantFormat& format, size_t count, Run run) {
    const size_t size = format.group_size;
    if (size > block) {
        for (size_t group = 0; group < format.groups(count); ++group) each_part(format, count, group, run);
        return;
    }
    const size_t groups = block / size, span = groups * size, bytes = format.code_bytes(span);
    for (Piece piece{0, 0, size, 0, 0}; piece.first < count; piece.first += span) {
        piece.count = std::min(span, count - piece.first);
        run(piece);
        piece.group += groups;
        piece.code += bytes;
    }
}

/// Throws Error (invalid_param) unless kernels quantize `dtype`.
inline void check_float(DType dtype) {
    if (info(dtype).quantizes) return;
    throw invalid_param(1483, "dtype is ", name_of(dtype), ", expected float32, float16 or bfloat16");
}

inline void check_sources(size_t n_sources) {
    if (n_sources == 0) throw invalid_param(1484, "n_sources is 0, expected at least one source to sum");
}

/// Returns elements `first` to `first + count` of an input as float32: in place, or widened into `buffer`.
inline const void* widened(DType dtype, Isa isa, const void* input, size_t first, size_t count, float* buffer) {
    const Bytes* from = static_cast<const Bytes*>(input) + first * size_of(dtype);
    if (dtype == DType::float32) return from;
    half_blocks(dtype, isa).widen(reinterpret_cast<Bytes*>(buffer), from, count);
    return buffer;
}

/// The largest finite magnitude of a type, and the least that rounding half to even makes inf; bits of float32.
struct Limit {
    uint32_t largest, too_large;
};
constexpr Limit limit_of(DType dtype) {
    if (dtype == DType::float16) return {0x477FE000u, 0x477FF000u};
    if (dtype == DType::bfloat16) return {0x7F7F0000u, 0x7F7F8000u};
    return {0x7F7FFFFFu, infinity_bits};
}

}  // namespace alltoallv::kernel::quant
