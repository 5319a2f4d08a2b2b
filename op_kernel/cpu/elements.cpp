/// \file elements.cpp
/// \brief Small floats by their bits; docs/quantization.md has the definitions.
#include "op_kernel/cpu/elements.h"

#include "op_kernel/cpu/small_floats.h"

namespace alltoallv::kernel::quant {
namespace {

constexpr uint32_t least_normal = 1u << 23;

template <class Element>
ALLTOALLV_INLINE void encode_groups(const void* x, size_t count, size_t group_size, const float* inverses,
                                    Bytes* codes) {
    with_group_size(group_size, [=](auto size) ALLTOALLV_LAMBDA {
        each_group(count, size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
            const float inverse = inverses[g];
            ALLTOALLV_INDEPENDENT
            for (size_t k = begin; k < begin + n; ++k) {
                const uint32_t bits = load<uint32_t>(x, k), magnitude = bits & 0x7FFFFFFFu;
                const uint32_t flushed = if_greater(least_normal, magnitude, 0u, magnitude) | (bits & 0x80000000u);
                codes[k] = static_cast<Bytes>(Element::encode(from_bits(flushed) * inverse));
            }
        });
    });
}

template <class Element>
ALLTOALLV_INLINE void multiply_groups(const void* codes, size_t count, size_t group_size, const float* scales,
                                      bool adds, float* out) {
    with_group_size(group_size, [=](auto size) ALLTOALLV_LAMBDA {
        each_group(count, size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
            const float scale = scales[g];
            const auto* from = static_cast<const Bytes*>(codes);
            if (adds) {
                ALLTOALLV_INDEPENDENT
                for (size_t k = begin; k < begin + n; ++k) out[k] = one_nan(out[k] + Element::decode(from[k]) * scale);
            } else {
                ALLTOALLV_INDEPENDENT
                for (size_t k = begin; k < begin + n; ++k) out[k] = one_nan(Element::decode(from[k]) * scale);
            }
        });
    });
}

#define ALLTOALLV_ELEMENT(id, Element)                                                                                 \
    ALLTOALLV_CLONES(encode_##id, encode_groups<Element>,                                                              \
                     (const void* x, size_t count, size_t group_size, const float* inverses, Bytes* codes),            \
                     (x, count, group_size, inverses, codes))                                                          \
    ALLTOALLV_CLONES(multiply_##id, multiply_groups<Element>,                                                          \
                     (const void* codes, size_t count, size_t group_size, const float* scales, bool adds, float* out), \
                     (codes, count, group_size, scales, adds, out))
ALLTOALLV_ELEMENT(e4m3, E4M3)
ALLTOALLV_ELEMENT(e5m2, E5M2)
ALLTOALLV_ELEMENT(e2m1, E2M1)

}  // namespace

Elements elements(CodeFormat format, Isa isa) {
    const auto i = static_cast<size_t>(isa);
    switch (info(format).mantissa) {
        case 3:
            return {encode_e4m3[i], multiply_e4m3[i]};
        case 2:
            return {encode_e5m2[i], multiply_e5m2[i]};
        default:
            return {encode_e2m1[i], multiply_e2m1[i]};
    }
}

}  // namespace alltoallv::kernel::quant
