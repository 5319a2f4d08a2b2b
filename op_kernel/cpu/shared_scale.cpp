// Sums int8 values that share a scale: exactly, so that order does not matter.
#include <cmath>

#include "op_kernel/cpu/half.h"
#include "op_kernel/cpu/quantize.h"
#include "op_kernel/cpu/quantize_blocks.h"

namespace alltoallv::kernel {
namespace {

using namespace quant;  // NOLINT

constexpr size_t sources_at_a_time = 4;
alignas(64) constexpr Bytes zeros[block] = {};

/// Computes sum = or += a + b + c + d.
template <bool begins>
ALLTOALLV_INLINE void sum_integers(const Bytes* const* in, size_t count, int32_t* sum) {
    const Bytes *a = in[0], *b = in[1], *c = in[2], *d = in[3];
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) {
        const int four = load<int8_t>(a, k) + load<int8_t>(b, k) + load<int8_t>(c, k) + load<int8_t>(d, k);
        sum[k] = begins ? four : sum[k] + four;
    }
}

/// Computes out = (sum + offset) * scale; if offset and scale are finite, at most the type's largest value.
ALLTOALLV_INLINE void scale_sums(const int32_t* sum, size_t count, float offset, const float* scales,
                                 const Limit& limit, float* out, bool* exceeded) {
    int32_t most = 0;
    const uint32_t finite_offset = if_greater(infinity_bits, magnitude_of(offset), ~0u, 0u);
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) {
        const float value = canonical_nan((static_cast<float>(sum[k]) + offset) * scales[k]);
        const uint32_t magnitude = magnitude_of(value);
        const uint32_t finite = finite_offset & if_greater(infinity_bits, magnitude_of(scales[k]), magnitude, 0u);
        most = static_cast<int32_t>(finite) > most ? static_cast<int32_t>(finite) : most;
        const uint32_t limited = if_greater(finite, limit.largest, limit.largest, magnitude);
        out[k] = from_bits(limited | (bits_of(value) & 0x80000000u));
    }
    *exceeded = static_cast<uint32_t>(most) >= limit.too_large;
}

/// Does the same if every sum is finite and fits.
ALLTOALLV_INLINE void scale_fitting_sums(const int32_t* sum, size_t count, float offset, const float* scales,
                                         void* out) {
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) store(out, k, (static_cast<float>(sum[k]) + offset) * scales[k]);
}

/// Avoids comparisons of floats, which not every compiler vectorizes.
ALLTOALLV_INLINE int8_t saturated_code(float value) {
    constexpr uint32_t largest = 0x42FE0000u;  // 127
    const uint32_t magnitude = magnitude_of(value);
    const uint32_t number = if_greater(magnitude, infinity_bits, 0u, magnitude);
    const uint32_t limited = if_greater(number, largest, largest, number);
    return round_code(from_bits(limited | (bits_of(value) & 0x80000000u)));
}

ALLTOALLV_INLINE void recode_sums(const int32_t* sum, size_t count, const float* ratios, void* codes) {
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) store(codes, k, saturated_code(static_cast<float>(sum[k]) * ratios[k]));
}

ALLTOALLV_INLINE void encode_scaled(const void* x, size_t count, const float* scales, void* codes) {
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) store(codes, k, saturated_code(load<float>(x, k) * (1.0f / scales[k])));
}

constexpr auto& start = clones<sum_integers<true>>;
constexpr auto& resume = clones<sum_integers<false>>;
constexpr auto& scale = clones<scale_sums>;
constexpr auto& scale_fitting = clones<scale_fitting_sums>;
constexpr auto& largest = clones<largest_of_groups>;
constexpr auto& recode = clones<recode_sums>;
constexpr auto& encode = clones<encode_scaled>;

/// Provides the scales of consecutive elements as an array, block by block; a few scales are repeated only once.
class ScaleBlocks {
  public:
    ScaleBlocks(const Scales& scales, size_t count) : scales_(scales), at_(scales.first % scales.size) {
        if (scales.size >= block) return;
        const size_t n = scales.size + std::min(block, count);
        size_t have = std::min(scales.size, n);
        std::copy_n(scales.values, have, repeated_);
        for (; have < n; have += std::min(have, n - have))
            std::copy_n(repeated_, std::min(have, n - have), repeated_ + have);  // doubles whole periods
        scales_.values = repeated_;
    }

    ScaleBlocks(const ScaleBlocks&) = delete;  // holds a pointer into itself
    ScaleBlocks& operator=(const ScaleBlocks&) = delete;

    /// Returns at most `count` elements whose scales lie in one array.
    size_t next(size_t count) const {
        return scales_.size < block ? std::min(block, count) : std::min({block, count, scales_.size - at_});
    }

    /// Returns the scales of the next `count` elements.
    const float* take(size_t count) {
        const float* values = scales_.values + at_;
        at_ = (at_ + count) % scales_.size;
        return values;
    }

  private:
    Scales scales_;
    size_t at_;
    alignas(64) float repeated_[2 * block];
};

/// Calls `run(first, count, sums, scales)` for blocks of the exact sums of the inputs.
template <class Run>
void each_sum(const void* const* inputs, size_t n_sources, size_t count, const Scales& scales, Isa isa, Run run) {
    check_sources(n_sources);
    ScaleBlocks blocks(scales, count);
    alignas(64) int32_t sum[block];
    for (size_t first = 0, n = 0; first < count; first += n) {
        n = blocks.next(count - first);
        for (size_t s = 0; s < n_sources; s += sources_at_a_time) {
            const Bytes* in[sources_at_a_time];
            for (size_t j = 0; j < sources_at_a_time; ++j)
                in[j] = s + j < n_sources ? static_cast<const Bytes*>(inputs[s + j]) + first : zeros;
            (s == 0 ? start : resume)[isa](in, n, sum);
        }
        run(first, n, sum, blocks.take(n));
    }
}

void check_scales(const Scales& scales) {
    if (scales.size == 0) throw invalid_param(1485, "scales are empty, expected 1 or one per channel");
}

}  // namespace

bool sum_shared_scale(DType dtype, const void* const* inputs, size_t n_sources, size_t count, const Scales& scales,
                      float offset, Overflow overflow, void* out, Isa isa) {
    check_float(dtype);
    check_scales(scales);
    const float offsets = static_cast<float>(n_sources) * offset;
    const bool limits = overflow != Overflow::infinity;
    const Limit limit = limits ? limit_of(dtype) : Limit{0x7FFFFFFFu, 0x7FFFFFFFu};
    // Rounding gains less than this factor.
    const double largest_fitting = 0.999 * from_bits(limit_of(dtype).largest);
    const double largest_sum = 128.0 * static_cast<double>(n_sources) + std::abs(offsets);
    const bool few = scales.size < block;
    uint32_t most = 0;  // of the scales
    if (few) largest[isa](scales.values, scales.size, scales.size, &most);
    bool fits = true;
    each_sum(inputs, n_sources, count, scales, isa,
             [=, &fits, &most](size_t first, size_t n, const int32_t* sum, const float* scale_of_each) {
                 alignas(64) float values[block];
                 if (!few) largest[isa](scale_of_each, n, n, &most);
                 const bool all_fit = most < infinity_bits && largest_sum * from_bits(most) <= largest_fitting;
                 void* to = static_cast<Bytes*>(out) + first * size_of(dtype);
                 if (all_fit) {
                     scale_fitting[isa](sum, n, offsets, scale_of_each, dtype == DType::float32 ? to : values);
                     if (dtype == DType::float32) return;
                 } else {
                     bool exceeded = false;
                     scale[isa](sum, n, offsets, scale_of_each, limit, values, &exceeded);
                     fits &= !exceeded;
                 }
                 if (dtype == DType::float32)
                     std::memcpy(to, values, n * sizeof(float));
                 else
                     half_blocks(dtype, isa).narrow(static_cast<Bytes*>(to), reinterpret_cast<const Bytes*>(values), n);
             });
    return fits || overflow != Overflow::raise;
}

void quantize_scaled(DType dtype, const void* input, size_t count, const Scales& scales, void* codes, Isa isa) {
    check_float(dtype);
    check_scales(scales);
    ScaleBlocks blocks(scales, count);
    alignas(64) float values[block];
    for (size_t first = 0, n = 0; first < count; first += n) {
        n = blocks.next(count - first);
        const void* x = widened(dtype, isa, input, first, n, values);
        encode[isa](x, n, blocks.take(n), static_cast<Bytes*>(codes) + first);
    }
}

void requantize_sum(const void* const* inputs, size_t n_sources, size_t count, const Scales& ratios, void* codes,
                    Isa isa) {
    check_scales(ratios);
    each_sum(inputs, n_sources, count, ratios, isa,
             [=](size_t first, size_t n, const int32_t* sum, const float* ratio_of_each) {
                 recode[isa](sum, n, ratio_of_each, static_cast<Bytes*>(codes) + first);
             });
}

}  // namespace alltoallv::kernel
