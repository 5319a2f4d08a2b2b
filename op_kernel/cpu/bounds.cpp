// Every step rounds to nearest, and `slack_` makes up for all of them: no bound is rounded down.
#include "op_kernel/cpu/bounds.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "op_kernel/cpu/codes.h"
#include "op_kernel/cpu/half.h"
#include "op_kernel/cpu/scales.h"
#include "op_kernel/cpu/shape.h"

namespace alltoallv::kernel {
namespace {

using namespace quant;  // NOLINT

constexpr size_t some = 256;  // elements at once, an even number
constexpr float infinite = std::numeric_limits<float>::infinity();
constexpr double half_ulp = 0x1p-24;  // of float32, relative

float rounded_up(double value) {
    const auto nearest = static_cast<float>(value);
    return nearest < value ? std::nextafter(nearest, infinite) : nearest;
}

/// What float32's arithmetic of a term is wrong by, relative. Per rank: scale and quotient, an addend of error
/// feedback, the product, the average; a sum per further rank.
double arithmetic(size_t ranks) {
    return static_cast<double>(ranks + 8) * half_ulp;
}

/// Returns the value of a code, given in its own bits.
float value_of(CodeFormat format, uint32_t code) {
    return with_code(format, [code]<class Code>(Code) { return Code::decode(code); });
}

/// Returns the code of the largest value.
uint32_t largest_code(CodeFormat format) {
    uint32_t code = 0;
    while (value_of(format, code) != info(format).most) ++code;
    return code;
}

/// Returns the power of two above the largest code: where OCP's scale of e8m0 lets magnitudes reach.
double reach(CodeFormat format) {
    return std::exp2(std::floor(std::log2(static_cast<double>(info(format).most))) + 1);
}

/// Returns half the gap below the largest code.
double last_half_gap(CodeFormat format) {
    const uint32_t code = largest_code(format);
    return (static_cast<double>(value_of(format, code)) - value_of(format, code - 1)) / 2;
}

/// Code k, in its own bits, of a group of `count` elements whose codes begin at `codes`.
uint32_t code_at(const Bytes* codes, size_t count, size_t k, int bits) {
    if (bits == 8) return codes[k];
    if (bits == 4) return codes[k / 2] >> k % 2 * 4 & 15u;  // one plane, in which blocks lie one after the other
    codes += k / block * packed_bytes(bits, block);
    const size_t at = k % block, length = std::min(block, count - (k - at));
    uint32_t code = 0;
    int shift = 0;
    for (const int width : {4, 2, 1}) {
        if ((bits & width) == 0) continue;
        const size_t bit = at * static_cast<size_t>(width);
        code |= (codes[bit / 8] >> bit % 8 & ((1u << width) - 1)) << shift;
        codes += packed_bytes(width, length);
        shift += width;
    }
    return code;
}

uint32_t largest_of(const float* values, size_t count) {
    uint32_t most = 0;
    for (size_t k = 0; k < count; ++k) most = std::max(most, magnitude_of(values[k]));
    return most;
}

const Bytes* codes_of(const QuantFormat& format, const CodedSource& source, size_t group) {
    return static_cast<const Bytes*>(source.codes) + format.code_bytes(group * format.group_size);
}

}  // namespace

std::vector<float> code_errors(CodeFormat format, size_t ranks) {
    const CodeFormatInfo& row = info(format);
    const double relative = arithmetic(ranks);
    if (row.mantissa < 0) return std::vector<float>(size_t{1} << row.bits, rounded_up(0.5 + row.most * relative));
    const uint32_t last = largest_code(format), sign = 1u << (row.bits - 1);
    std::vector<float> errors(size_t{2} * sign, infinite);
    for (uint32_t code = 0; code <= last; ++code) {
        const double value = value_of(format, code);
        double gap = code == last ? 2 * last_half_gap(format) : value_of(format, code + 1) - value;
        if (code == last && row.scale == ScaleKind::e8m0 && !row.has(rounds_up))
            gap = std::max(gap, 2 * (reach(format) - value));
        errors[code] = errors[code | sign] = rounded_up(gap / 2 + value * relative);
    }
    return errors;
}

std::vector<float> turned_errors(CodeFormat format, size_t ranks) {
    const double most = info(format).most;
    std::vector<float> errors;
    for (int passes = 0; size_t{1} << passes <= longest_shaped; ++passes) {
        // A pass, the root, its product, and elements that are left out, of a group and of its codes.
        const double turns = 2 * (passes + 3) * half_ulp * (most + 1);
        const double root = std::sqrt(static_cast<double>(size_t{1} << passes));
        errors.push_back(rounded_up(root * (0.5 + most * arithmetic(ranks) + turns)));
    }
    return errors;
}

std::vector<float> scale_errors(CodeFormat format) {
    std::vector<float> scales;
    if (info(format).scale == ScaleKind::e8m0) {
        for (int byte = 0; byte < 256; ++byte) scales.push_back(std::ldexp(1.0f, std::max(byte, 1) - 127));
        scales.back() = infinite;
        const double most = info(format).most;
        if (info(format).has(rounds_up))  // there is no larger scale by which the largest numbers would not saturate
            scales[254 - std::ilogb(most)] *= rounded_up((reach(format) - most) / last_half_gap(format));
    }
    if (info(format).scale == ScaleKind::e4m3) {
        // A quotient above the byte's value, up to the middle of the next gap, lets codes saturate; byte 0 loses all.
        const double most = info(format).most, half_gap = last_half_gap(format);
        for (uint32_t byte = 0; byte < 256; ++byte) {
            const double value = E4M3::decode(byte), next = E4M3::decode(byte + 1);
            const double excess = byte < E4M3::most_code ? most * (next - value) / 2 : 0;
            const double gap = byte == 0 ? value_of(format, 1) / 2 : half_gap;
            scales.push_back(byte > E4M3::most_code ? infinite : rounded_up(std::max(value, excess / gap)));
        }
    }
    return scales;
}

Bounds::Bounds(CodeFormat format, size_t ranks, bool average, bool requantizes, DType out_dtype, Overflow overflow)
    : ranks_(ranks),
      sources_(ranks + (requantizes ? 1 : 0)),
      average_(average),
      out_dtype_(out_dtype),
      overflow_(overflow),
      codes_(code_errors(format, ranks)),
      turned_(turned_errors(format, ranks)),
      scales_(scale_errors(format)),
      slack_(rounded_up(1 + static_cast<double>(ranks + 16) * 2 * half_ulp)),
      least_(rounded_up(static_cast<double>(ranks + 2) * 0x1p-123)) {}

void Bounds::find(const QuantFormat& format, const CodedSource* sources, size_t count, const float* values,
                  float* bounds) const {
    for (size_t group = 0; group < format.groups(count); ++group) {
        const size_t begin = group * format.group_size, n = std::min(format.group_size, count - begin);
        const uint32_t most =
            values == nullptr ? largest_value(format, sources[sources_ - 1], group, n) : largest_of(values + begin, n);
        const float error = largest_error(format, sources, group, n) + rounding(from_bits(most));
        bounds[group] = most < infinity_bits ? error * slack_ + least_ : infinite;
    }
}

/// Returns the scale by which a source's errors count.
float Bounds::scale_of(const QuantFormat& format, const CodedSource& source, size_t group) const {
    const auto* record = static_cast<const Bytes*>(source.scales);
    const size_t at = format.first_group + group;
    if (format.has_floats()) return load<float>(record, at);
    if (info(format.codes).scale == ScaleKind::e8m0) return scales_[record[at]];
    return scales_[record[sizeof(float) + at]] * load<float>(record, 0);
}

/// Returns what a spike can be wrong by: half a unit of bfloat16, a whole one of the largest, and its arithmetic.
float Bounds::error_of_spike(uint16_t value) const {
    const float magnitude = from_bits(magnitude_of(bfloat16_to_float(value)));
    const float unit = from_bits(bits_of(magnitude) & infinity_bits) * 0x1p-8f;
    const bool largest = (value & 0x7FFFu) == 0x7F7Fu;
    return (largest ? 2 * unit : unit) + magnitude * rounded_up(arithmetic(ranks_));
}

/// Returns what the elements of a group can be wrong by in a format whose codes all have one error.
float Bounds::error_of_group(const QuantFormat& format, const CodedSource& source, size_t group, size_t count) const {
    const CodeFormatInfo& row = info(format.codes);
    const size_t each = row.has(spikes) ? spiked_scale_bytes : sizeof(float);
    const Bytes* record = static_cast<const Bytes*>(source.scales) + (format.first_group + group) * each;
    const float given = load<float>(record, 0);
    float scale = given < 0 ? -given : given;
    if (row.bits < 4 && scale == largest_inverted) scale = infinite;  // codes may have been saturated
    float error = (given < 0 ? turned_[static_cast<size_t>(std::bit_width(count) - 1)] : codes_[0]) * scale;
    if (!row.has(spikes)) return error;
    Spike found[spikes_each];
    std::memcpy(found, record + sizeof(float), sizeof found);
    for (const Spike& spike : found)
        if (spike.index < count) error = std::max(error, error_of_spike(spike.value));
    return error;
}

/// Returns the largest sum of what the codes of an element can be wrong by.
float Bounds::largest_error(const QuantFormat& format, const CodedSource* sources, size_t group, size_t count) const {
    const int bits = format.bits();
    float most = 0;
    for (size_t s = 0; info(format.codes).mantissa < 0 && s < sources_; ++s) {
        most += error_of_group(format, sources[s], group, count);
        if (average_ && s + 1 == ranks_) most /= static_cast<float>(ranks_);
    }
    if (info(format.codes).mantissa < 0) return most;
    for (size_t first = 0; first < count; first += some) {
        const size_t n = std::min(some, count - first);
        float sums[some] = {};
        for (size_t s = 0; s < sources_; ++s) {
            const float scale = scale_of(format, sources[s], group);
            const Bytes* codes = codes_of(format, sources[s], group);
            for (size_t k = 0; k < n; ++k) sums[k] += codes_[code_at(codes, count, first + k, bits)] * scale;
            if (!average_ || s + 1 != ranks_) continue;
            for (size_t k = 0; k < n; ++k) sums[k] /= static_cast<float>(ranks_);
        }
        most = std::max(most, *std::max_element(sums, sums + n));
    }
    return most;
}

/// Returns the largest magnitude of a source's values, as bits.
uint32_t Bounds::largest_value(const QuantFormat& format, const CodedSource& source, size_t group, size_t count) const {
    QuantFormat one = format;
    one.first_group += group;
    if (format.has_floats()) one.group_size = count;
    std::vector<float> values(count);
    dequantize(one, DType::float32, codes_of(format, source, group), source.scales, count, Overflow::infinity,
               values.data());
    return largest_of(values.data(), count);
}

/// Returns what rounding a value of this magnitude to the output's type can be wrong by.
float Bounds::rounding(float magnitude) const {
    if (out_dtype_ == DType::float32) return 0;
    const Limit limit = limit_of(out_dtype_);
    if (overflow_ == Overflow::infinity && bits_of(magnitude) >= limit.too_large) return infinite;
    const bool half = out_dtype_ == DType::float16;
    const float usual = magnitude * (half ? 0x1p-11f : 0x1p-8f) + (half ? 0x1p-25f : 0x1p-126f);
    return usual + std::max(magnitude - from_bits(limit.largest), 0.0f);
}

}  // namespace alltoallv::kernel
