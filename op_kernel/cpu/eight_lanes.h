// Converts codes to values and values to codes with AVX2, eight elements at a time.
//
// GCC works on 32 codes and widens them in two steps across both halves of a register: this takes twice the time of the
// code here, and a little more than it with AVX-512. (It vectorizes the same loops well for NEON.)
#pragma once

#include <cstddef>

#include "op_kernel/cpu/clones.h"
#include "op_kernel/cpu/codes.h"
#include "op_kernel/cpu/quantize_blocks.h"

#if ALLTOALLV_HAS_CLONES
#include <immintrin.h>
#endif

namespace alltoallv::kernel::quant {

/// Handling of products: start a sum, start it with stores past the caches, or add to an existing sum.
enum class Sum { start, stream, resume };

/// Orders earlier stores past the caches before later stores.
inline void fence_streamed() {
#if ALLTOALLV_HAS_CLONES
    _mm_sfence();
#endif
}

#if ALLTOALLV_HAS_CLONES

struct Sixteen {
    __m256 low, high;
};

/// Multiplies codes by `scale`, which includes Code::unit. A small float has the bits of a float16 of another exponent.
template <class Code>
ALLTOALLV_TARGET_V3 inline Sixteen products(const Bytes* codes, __m256 scale) {
    if constexpr (Code::integer) {
        const auto eight = [=](size_t k) ALLTOALLV_TARGET_V3 ALLTOALLV_LAMBDA {
            const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + k));
            return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), scale);
        };
        return {eight(0), eight(8)};
    } else {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
        const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), Code::half_shift);
        const __m256i halves = _mm256_and_si256(moved, _mm256_set1_epi16(Code::half_mask));
        return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), scale),
                _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), scale)};
    }
}

/// Computes sum = or += a * scale_a (+ b * scale_b); `b` may be null, `n` is a multiple of 16. With streaming, `sum`
/// must be aligned to 32 bytes, and a fence must follow.
template <class Code, Sum kind>
ALLTOALLV_TARGET_V3 inline void add_eights(const Bytes* a, float scale_a, const Bytes* b, float scale_b, size_t n,
                                           Bytes* sum) {
    auto* to = reinterpret_cast<float*>(sum);
    const __m256 of_a = _mm256_set1_ps(scale_a * Code::unit), of_b = _mm256_set1_ps(scale_b * Code::unit);
    for (size_t k = 0; k < n; k += 16) {
        Sixteen total = products<Code>(a + k, of_a);
        if (kind == Sum::resume) {
            total = {_mm256_add_ps(_mm256_loadu_ps(to + k), total.low),
                     _mm256_add_ps(_mm256_loadu_ps(to + k + 8), total.high)};
        }
        if (b != nullptr) {
            const Sixteen more = products<Code>(b + k, of_b);
            total = {_mm256_add_ps(total.low, more.low), _mm256_add_ps(total.high, more.high)};
        }
        if (kind == Sum::stream) {
            _mm256_stream_ps(to + k, total.low);
            _mm256_stream_ps(to + k + 8, total.high);
        } else {
            _mm256_storeu_ps(to + k, total.low);
            _mm256_storeu_ps(to + k + 8, total.high);
        }
    }
}

/// Computes integer codes; for a small float, its magnitude's code, shifted left by Code::spare.
template <class Code>
ALLTOALLV_TARGET_V3 inline __m256i eight_codes(__m256 values) {
    if constexpr (Code::integer) {
        return _mm256_cvtps_epi32(values);
    } else {  // like Code::encode(), up to the sum, whose lowest 16 bits count units and whose others are its exponent
        const __m256 x = _mm256_and_ps(values, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF)));
        const __m256 power = _mm256_and_ps(values, _mm256_set1_ps(from_bits(infinity_bits)));
        const __m256i step = _mm256_max_epi32(_mm256_castps_si256(power), _mm256_set1_epi32(Code::least_normal));
        const __m256 sum =
            _mm256_fmadd_ps(_mm256_castsi256_ps(step), _mm256_set1_ps(Code::rounder), x);  // one rounding
        return _mm256_madd_epi16(_mm256_castps_si256(sum), _mm256_set1_epi32(1 << 16 | 1 << Code::spare));
    }
}

/// Computes twice eight codes in words of 16 bits; groups of four are contiguous.
template <class Code>
ALLTOALLV_TARGET_V3 inline __m256i sixteen_codes(__m256 a, __m256 b) {
    const __m256i words = _mm256_packs_epi32(eight_codes<Code>(a), eight_codes<Code>(b));
    if constexpr (Code::integer)
        return words;
    else
        return _mm256_srli_epi16(words, Code::spare);
}

ALLTOALLV_TARGET_V3 inline __m256i packed(__m256 a, __m256 b) {
    return _mm256_packs_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b));
}

template <class Code>
ALLTOALLV_TARGET_V3 inline __m256i thirty_two_codes(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m256i codes = _mm256_packs_epi16(sixteen_codes<Code>(a, b), sixteen_codes<Code>(c, d));
    if constexpr (!Code::integer) {  // saturation keeps the sign of bits that are treated as a number
        const __m256i signs = _mm256_packs_epi16(packed(a, b), packed(c, d));
        constexpr int to_sign = 7 - Code::magnitude_bits;  // bits of the upper code of two do not matter
        const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(signs, to_sign), _mm256_set1_epi8(Code::sign_mask));
        codes = _mm256_or_si256(_mm256_min_epi8(codes, _mm256_set1_epi8(Code::most_code)), sign);
    }
    // Packing works in each half of a register, so words of four codes are in this order.
    return _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/// Computes the codes of x * inverse, for which Code::flushes() is false; `n` is a multiple of 16.
template <class Code>
ALLTOALLV_TARGET_V3 inline void encode_eights(const void* x, float inverse, size_t n, Bytes* codes) {
    const __m256 factor = _mm256_set1_ps(inverse);
    const auto* from = static_cast<const float*>(x);
    const auto eight = [=](size_t k) ALLTOALLV_TARGET_V3 ALLTOALLV_LAMBDA {
        return _mm256_mul_ps(_mm256_loadu_ps(from + k), factor);
    };
    size_t k = 0;
    for (; k + 32 <= n; k += 32) {
        const __m256i bytes = thirty_two_codes<Code>(eight(k), eight(k + 8), eight(k + 16), eight(k + 24));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + k), bytes);
    }
    if (k == n) return;
    const __m256i bytes = thirty_two_codes<Code>(eight(k), eight(k + 8), eight(k), eight(k));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + k), _mm256_castsi256_si128(bytes));
}

#endif

}  // namespace alltoallv::kernel::quant
