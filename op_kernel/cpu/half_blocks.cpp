// Converts halves by vectorized integer arithmetic, or by the instructions of F16C and NEON.
#include "op_kernel/cpu/half_blocks.h"

#include "op_kernel/cpu/half.h"

#if ALLTOALLV_HAS_CLONES
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace alltoallv::kernel {
namespace {

template <float (*to_float)(uint16_t)>
ALLTOALLV_INLINE void widen(Bytes* out, const Bytes* in, size_t count) {
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) store(out, k, to_float(load<uint16_t>(in, k)));
}

template <uint16_t (*from_float)(float)>
ALLTOALLV_INLINE void narrow(Bytes* out, const Bytes* in, size_t count) {
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) store(out, k, from_float(load<float>(in, k)));
}

constexpr auto& widen_bfloat16 = clones<widen<bfloat16_to_float>>;
constexpr auto& narrow_bfloat16 = clones<narrow<float_to_bfloat16>>;

// float16: the processor's own conversions give the same bits in a fraction of the time.
#if ALLTOALLV_HAS_CLONES
ALLTOALLV_TARGET_V3 void widen_float16_v3(Bytes* out, const Bytes* in, size_t count) {
    size_t k = 0;
    for (; k + 8 <= count; k += 8) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + k * 2));
        _mm256_storeu_ps(reinterpret_cast<float*>(out + k * 4), _mm256_cvtph_ps(half));
    }
    widen<float16_to_float>(out + k * 4, in + k * 2, count - k);
}

ALLTOALLV_TARGET_V3 void narrow_float16_v3(Bytes* out, const Bytes* in, size_t count) {
    size_t k = 0;
    for (; k + 8 <= count; k += 8) {
        const __m256 full = _mm256_loadu_ps(reinterpret_cast<const float*>(in + k * 4));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k * 2), _mm256_cvtps_ph(full, _MM_FROUND_TO_NEAREST_INT));
    }
    narrow<float_to_float16>(out + k * 2, in + k * 4, count - k);
}

constexpr auto& widen_float16 = clones_by_isa<widen<float16_to_float>, widen_float16_v3, widen_float16_v3>;
constexpr auto& narrow_float16 = clones_by_isa<narrow<float_to_float16>, narrow_float16_v3, narrow_float16_v3>;
#elif defined(__aarch64__)
ALLTOALLV_INLINE void widen_neon(Bytes* out, const Bytes* in, size_t count) {
    size_t k = 0;
    for (; k + 4 <= count; k += 4) {
        const float32x4_t full = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(in + k * 2)));
        vst1q_u8(out + k * 4, vreinterpretq_u8_f32(full));
    }
    widen<float16_to_float>(out + k * 4, in + k * 2, count - k);
}

ALLTOALLV_INLINE void narrow_neon(Bytes* out, const Bytes* in, size_t count) {
    size_t k = 0;
    for (; k + 4 <= count; k += 4) {
        const float16x4_t half = vcvt_f16_f32(vreinterpretq_f32_u8(vld1q_u8(in + k * 4)));
        vst1_u8(out + k * 2, vreinterpret_u8_f16(half));
    }
    narrow<float_to_float16>(out + k * 2, in + k * 4, count - k);
}

constexpr auto& widen_float16 = clones<widen_neon>;
constexpr auto& narrow_float16 = clones<narrow_neon>;
#else
constexpr auto& widen_float16 = clones<widen<float16_to_float>>;
constexpr auto& narrow_float16 = clones<narrow<float_to_float16>>;
#endif

}  // namespace

HalfBlocks half_blocks(DType dtype, Isa isa) {
    if (dtype == DType::float16) return {widen_float16[isa], narrow_float16[isa]};
    return {widen_bfloat16[isa], narrow_bfloat16[isa]};
}

}  // namespace alltoallv::kernel
