/// \file eight_lanes.h
/// \brief Codes to values and values to codes with AVX2, eight elements at a time.
///
/// GCC takes 32 codes for its unit and widens them in two steps across both halves of a register: twice the time of
/// what stands here. (It vectorizes the same loops well for AVX-512 and NEON.)
#pragma once

#include <cstddef>

#include "op_kernel/cpu/clones.h"
#include "op_kernel/cpu/quantize_blocks.h"

#if ALLTOALLV_HAS_CLONES
#include <immintrin.h>
#endif

namespace alltoallv::kernel::quant {

/// What becomes of products: the sum, the sum with stores past the caches, a part of the sum that is there.
enum class Sum { start, stream, resume };

/// Orders what was stored past the caches before what is stored from now on.
inline void fence_streamed() {
#if ALLTOALLV_HAS_CLONES
    _mm_sfence();
#endif
}

#if ALLTOALLV_HAS_CLONES

ALLTOALLV_TARGET_V3 inline __m256 eight_products(const Bytes* codes, __m256 scale) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), scale);
}

/// sum = or += a * scale_a (+ b * scale_b); `b` may be null, `n` is a multiple of 8. What streams needs a `sum` that is
/// aligned to 32 bytes, and a fence later on.
template <Sum kind>
ALLTOALLV_TARGET_V3 inline void add_eight(const Bytes* a, float scale_a, const Bytes* b, float scale_b, size_t n,
                                          Bytes* sum) {
    auto* to = reinterpret_cast<float*>(sum);
    const __m256 of_a = _mm256_set1_ps(scale_a), of_b = _mm256_set1_ps(scale_b);
    for (size_t k = 0; k < n; k += 8) {
        __m256 total = eight_products(a + k, of_a);
        if (kind == Sum::resume) total = _mm256_add_ps(_mm256_loadu_ps(to + k), total);
        if (b != nullptr) total = _mm256_add_ps(total, eight_products(b + k, of_b));
        if (kind == Sum::stream) {
            _mm256_stream_ps(to + k, total);
        } else {
            _mm256_storeu_ps(to + k, total);
        }
    }
}

/// The codes of x * inverse, each within -127 to 127; `n` is a multiple of 32.
ALLTOALLV_TARGET_V3 inline void encode_eight(const void* x, float inverse, size_t n, Bytes* codes) {
    const __m256 factor = _mm256_set1_ps(inverse);
    // Packing works in each half of a register: words of four codes come out in this order.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (size_t k = 0; k < n; k += 32) {
        const float* from = static_cast<const float*>(x) + k;
        const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from), factor));
        const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + 8), factor));
        const __m256i c = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + 16), factor));
        const __m256i d = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + 24), factor));
        const __m256i words = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + k), _mm256_permutevar8x32_epi32(words, order));
    }
}

#endif

}  // namespace alltoallv::kernel::quant
