// Converts the codes of small floats to values and back with AVX-512 and its permutations of bytes, 64 at a time.
//
// AVX2 goes through float16, whose conversions take twice the time of the table here.
#pragma once

#include <array>
#include <cstddef>

#include "op_kernel/cpu/eight_lanes.h"

#if ALLTOALLV_HAS_CLONES

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of GCC 12's own header: bug 105593
#endif

namespace alltoallv::kernel::quant {

/// The upper and the next eight bits of the float32 values of all magnitudes; the other bits are 0.
template <class Code>
struct ValueBytes {
    alignas(64) std::array<Bytes, 128> upper{}, next{};

    constexpr ValueBytes() {
        for (uint32_t code = 0; code < 128; ++code) {
            const uint32_t bits = bits_of(Code::decode(code & Code::magnitude_mask));
            upper[code] = static_cast<Bytes>(bits >> 24);
            next[code] = static_cast<Bytes>(bits >> 16);
        }
    }
};
template <class Code>
inline constexpr ValueBytes<Code> value_bytes;

/// Byte k of a register after a permutation is byte index[k] of those before.
struct Permutation {
    alignas(64) std::array<Bytes, 64> index{};

    /// Every fourth byte of two registers, from `lower` on and then from `upper` on.
    static constexpr Permutation every_fourth(size_t lower, size_t upper) {
        Permutation made;
        for (size_t k = 0; k < 32; ++k) {
            made.index[k] = static_cast<Bytes>(lower + 4 * k);
            made.index[32 + k] = static_cast<Bytes>(upper + 4 * k);
        }
        return made;
    }

    /// Where unpacking bytes to words in each quarter leaves element k of part q in the lower (even q) or the upper
    /// half of its four bytes.
    static constexpr Permutation before_unpacking() {
        Permutation made;
        for (size_t q = 0; q < 4; ++q)
            for (size_t k = 0; k < 16; ++k)
                made.index[k / 4 * 16 + q / 2 * 8 + k % 4 * 2 + q % 2] = static_cast<Bytes>(16 * q + k);
        return made;
    }
};

struct SixtyFour {
    __m512 part[4];
};

ALLTOALLV_TARGET_VBMI inline __m512i load_bytes(const Bytes* from) {
    return _mm512_loadu_si512(from);
}

template <class Code>
ALLTOALLV_TARGET_VBMI inline SixtyFour products(const Bytes* codes, __m512 scale) {
    const auto& table = value_bytes<Code>;
    const Bytes *upper = table.upper.data(), *next = table.next.data();
    static constexpr Permutation order = Permutation::before_unpacking();
    const __m512i code = _mm512_permutexvar_epi8(load_bytes(order.index.data()), load_bytes(codes));
    const __m512i low = _mm512_permutex2var_epi8(load_bytes(next), code, load_bytes(next + 64));
    const __m512i magnitude = _mm512_permutex2var_epi8(load_bytes(upper), code, load_bytes(upper + 64));
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, code, _mm512_set1_epi8(-128), 0xF8);  // a | (b & c)
    const __m512i a = _mm512_unpacklo_epi8(low, high), b = _mm512_unpackhi_epi8(low, high);
    const auto times = [=](__m512i values) ALLTOALLV_TARGET_VBMI ALLTOALLV_LAMBDA {
        return _mm512_mul_ps(_mm512_castsi512_ps(values), scale);
    };
    const __m512i upper_half = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    return {{times(_mm512_slli_epi32(a, 16)), times(_mm512_and_si512(a, upper_half)), times(_mm512_slli_epi32(b, 16)),
             times(_mm512_and_si512(b, upper_half))}};
}

/// Does what add_eights() does; `n` is a multiple of 64.
template <class Code, Sum kind>
ALLTOALLV_TARGET_VBMI inline void add_sixty_fours(const Bytes* a, float scale_a, const Bytes* b, float scale_b,
                                                  size_t n, Bytes* sum) {
    auto* to = reinterpret_cast<float*>(sum);
    const __m512 of_a = _mm512_set1_ps(scale_a), of_b = _mm512_set1_ps(scale_b);
    for (size_t k = 0; k < n; k += 64) {
        SixtyFour total = products<Code>(a + k, of_a);
        if (kind == Sum::resume) {
            for (size_t q = 0; q < 4; ++q)
                total.part[q] = _mm512_add_ps(_mm512_loadu_ps(to + k + 16 * q), total.part[q]);
        }
        if (b != nullptr) {
            const SixtyFour more = products<Code>(b + k, of_b);
            for (size_t q = 0; q < 4; ++q) total.part[q] = _mm512_add_ps(total.part[q], more.part[q]);
        }
        for (size_t q = 0; q < 4; ++q) {
            float* place = to + k + 16 * q;
            if (kind == Sum::stream) {  // aligned to 32 bytes
                _mm256_stream_ps(place, _mm512_castps512_ps256(total.part[q]));
                _mm256_stream_ps(place + 8, _mm512_extractf32x8_ps(total.part[q], 1));
            } else {
                _mm512_storeu_ps(place, total.part[q]);
            }
        }
    }
}

/// True if encode_sixty_fours() takes this inverse of a scale: its multiple by 2^Code::shift is finite.
template <class Code>
bool encodes_sixty_fours(float inverse) {
    return bits_of(inverse) < static_cast<uint32_t>(127 + 127 - Code::shift) << 23;
}

/// Does what encode_eights() does; `n` is a multiple of 64.
///
/// As in Code::encode() a power of two is added, at whose last place the code's last place lies. Then the lowest bits
/// count units, and the exponent counts units above those. Their sum begins at bit 8, less what is added for exponents
/// of the least normal numbers, which `bias` takes back beforehand, modulo 256.
template <class Code>
ALLTOALLV_TARGET_VBMI inline void encode_sixty_fours(const void* x, float inverse, size_t n, Bytes* codes) {
    constexpr int mantissa = 23 - Code::shift;
    constexpr uint32_t least = Code::least_normal + (static_cast<uint32_t>(Code::shift) << 23);
    constexpr int bias = static_cast<int>((0u - ((least >> 23) << mantissa)) & 0xFFu);
    constexpr float power = static_cast<float>(1 << Code::shift);
    static constexpr Permutation codes_and_signs = Permutation::every_fourth(1, 3);

    const __m512 scale = _mm512_set1_ps(inverse * power), unscale = _mm512_set1_ps(1 / power);
    const __m512i sign_and_power = _mm512_set1_epi32(static_cast<int>(0xFF800000u));
    const __m512 smallest = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(least) | bias));
    const __m512i weights = _mm512_set1_epi32(1 << (16 + mantissa + 1) | 1 << 8);
    const __m512i pick = load_bytes(codes_and_signs.index.data());
    const auto* from = static_cast<const float*>(x);
    const auto sixteen = [=](size_t k) ALLTOALLV_TARGET_VBMI ALLTOALLV_LAMBDA {
        const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(from + k), scale);
        const __m512i step = _mm512_ternarylogic_epi32(_mm512_castps_si512(scaled), sign_and_power,
                                                       _mm512_set1_epi32(bias), 0xEA);   // (a & b) | c
        const __m512 rounder = _mm512_range_ps(_mm512_castsi512_ps(step), smallest, 3);  // larger magnitude, a's sign
        const __m512 sum = _mm512_fmadd_ps(scaled, unscale, rounder);                    // the product is exact
        return _mm512_madd_epi16(_mm512_castps_si512(sum), weights);
    };
    for (size_t k = 0; k < n; k += 64) {
        const __m512i a = _mm512_permutex2var_epi8(sixteen(k), pick, sixteen(k + 16));
        const __m512i b = _mm512_permutex2var_epi8(sixteen(k + 32), pick, sixteen(k + 48));
        const __m512i magnitude = _mm512_inserti64x4(a, _mm512_castsi512_si256(b), 1);
        const __m512i sign = _mm512_shuffle_i64x2(a, b, 0xEE);
        const __m512i limited = _mm512_min_epu8(magnitude, _mm512_set1_epi8(Code::most_code));
        const __m512i mask = _mm512_set1_epi8(Code::sign_mask);
        _mm512_storeu_si512(codes + k, _mm512_ternarylogic_epi32(limited, sign, mask, 0xF8));  // a | (b & c)
    }
}

}  // namespace alltoallv::kernel::quant

#endif
