// Computes scales of groups by their largest magnitudes; docs/quantization.md has the definitions.
#include "op_kernel/cpu/scales.h"

#include <algorithm>
#include <array>

#include "op_kernel/cpu/codes.h"
#include "op_kernel/cpu/half.h"
#include "op_kernel/cpu/quantize.h"

namespace alltoallv::kernel {
namespace quant {
namespace {

/// Bounds of a scale. From 2^-125 on, the quotient of a subnormal rounds to 0 even if the processor keeps subnormals;
/// above the largest scale, the largest code would be dequantized to inf, or the inverse were subnormal.
constexpr float least_scale = 0x1p-125f;
constexpr float largest_scale(const CodeFormatInfo& codes) {
    constexpr float largest = from_bits(infinity_bits - 1);
    const float most = codes.most, quotient = largest / most;  // may be rounded up
    constexpr double infinite = 0x1.ffffffp+127;               // what rounds to inf
    const bool fits = static_cast<double>(quotient) * static_cast<double>(most) < infinite;
    return std::min(fits ? quotient : from_bits(bits_of(quotient) - 1), largest_inverted);
}
constexpr std::array largest_scales = [] {
    std::array<float, code_format_table.size()> scales;
    std::ranges::transform(code_format_table, scales.begin(), largest_scale);
    return scales;
}();
/// Bounds of NVFP4's scale: its product with the least float8 is normal, with the largest and the largest code finite.
constexpr float least_tensor = 0x1p-110f, largest_tensor = 0x1.861860p+116f, tensor_range = 6 * 448;

constexpr Bytes nan_byte_e8m0 = 0xFF, nan_byte_e4m3 = 0x7F;
constexpr uint32_t half_of_least_normal = 1u << 22;  // 2^-127, the least power of e8m0

/// Computes scales and their inverses, which are 0 if codes do not depend on them: scale 0, inf, NaN.
ALLTOALLV_INLINE void scales_of_groups(const uint32_t* magnitudes, size_t groups, float largest_code,
                                       float largest_scale, float* scales, float* inverses) {
    ALLTOALLV_INDEPENDENT
    for (size_t g = 0; g < groups; ++g) {
        const uint32_t magnitude = magnitudes[g];
        float scale = from_bits(magnitude) / largest_code;
        scale = scale < least_scale ? least_scale : scale;
        scale = scale > largest_scale ? largest_scale : scale;
        const uint32_t special = if_greater(magnitude, infinity_bits, nan_bits, infinity_bits);
        const uint32_t some = if_greater(least_normal, magnitude, 0u, bits_of(scale));
        const uint32_t inverse = if_greater(least_normal, magnitude, 0u, bits_of(1.0f / scale));
        scales[g] = from_bits(if_greater(infinity_bits, magnitude, some, special));
        inverses[g] = from_bits(if_greater(infinity_bits, magnitude, inverse, 0u));
    }
}

constexpr auto& scale = clones<scales_of_groups>;

/// Computes powers of two. Down, OCP MX 6.3: the largest one not above the magnitude, divided by the same of the
/// largest code. Up: the least one whose product with the largest code holds the magnitude, or is the largest that is
/// finite.
void powers(CodeFormat format, const uint32_t* magnitudes, size_t groups, float* scales, float* inverses,
            Bytes* bytes) {
    const uint32_t most = bits_of(info(format).most), fraction = (1u << 23) - 1;
    const int exponent = static_cast<int>(most >> 23) - 127, largest = 254 - exponent;
    const uint32_t up = info(format).has(rounds_up) ? fraction - (most & fraction) : 0;  // carries if it exceeds `most`
    for (size_t g = 0; g < groups; ++g) {
        const bool finite = magnitudes[g] < infinity_bits;
        const int power = std::clamp(static_cast<int>((magnitudes[g] + up) >> 23) - exponent, 0, largest);
        bytes[g] = finite ? static_cast<Bytes>(power) : nan_byte_e8m0;
        inverses[g] = finite ? from_bits(static_cast<uint32_t>(254 - power) << 23) : 0.0f;
    }
    scales_from_bytes(format, bytes, groups, 0.0f, scales);
}

}  // namespace

void scales_of_floats(CodeFormat format, const uint32_t* magnitudes, size_t groups, float* scales, float* inverses,
                      Isa isa) {
    scale[isa](magnitudes, groups, info(format).most, largest_scales[static_cast<size_t>(format)], scales, inverses);
}

void scales_of_bytes(CodeFormat format, const uint32_t* magnitudes, size_t groups, float tensor, float* scales,
                     float* inverses, Bytes* bytes) {
    if (info(format).scale == ScaleKind::e8m0) return powers(format, magnitudes, groups, scales, inverses, bytes);
    for (size_t g = 0; g < groups; ++g) {
        const uint32_t magnitude = magnitudes[g] < least_normal ? 0u : magnitudes[g];
        const bool finite = magnitude < infinity_bits;
        const float wanted = finite ? from_bits(magnitude) / info(format).most / tensor : 0.0f;
        bytes[g] = finite ? static_cast<Bytes>(E4M3::encode(wanted)) : nan_byte_e4m3;
        scales[g] = E4M3::decode(bytes[g]) * tensor;
        inverses[g] = finite && bytes[g] != 0 ? 1.0f / scales[g] : 0.0f;
    }
}

void scales_from_bytes(CodeFormat format, const Bytes* bytes, size_t groups, float tensor, float* scales) {
    const bool powers_of_two = info(format).scale == ScaleKind::e8m0;
    for (size_t g = 0; g < groups; ++g) {
        const uint32_t byte = bytes[g];
        const uint32_t power = byte == nan_byte_e8m0 ? nan_bits : byte == 0 ? half_of_least_normal : byte << 23;
        scales[g] = powers_of_two ? from_bits(power) : canonical_nan(E4M3::decode(byte) * tensor);
    }
}

}  // namespace quant

float scale_of(CodeFormat codes, uint32_t magnitude) {
    float scale_value = 0, inverse = 0;
    quant::scales_of_floats(codes, &magnitude, 1, &scale_value, &inverse, Isa::base);
    return scale_value;
}

float tensor_scale(uint32_t magnitude) {
    return limited_tensor_scale(from_bits(magnitude) / quant::tensor_range);
}

float limited_tensor_scale(float sum) {
    return std::min(std::max(sum, quant::least_tensor), quant::largest_tensor);
}

}  // namespace alltoallv::kernel
