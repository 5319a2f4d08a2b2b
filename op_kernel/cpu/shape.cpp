#include "op_kernel/cpu/shape.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "op_kernel/cpu/half.h"
#include "op_kernel/cpu/quantize_blocks.h"
#include "op_kernel/cpu/scales.h"

namespace alltoallv::kernel::quant {
namespace {

/// Groups are rotated with largest magnitudes from 2^-60 to below 2^117: no sum of 1,024 elements leaves float32's
/// range. Elements below 2^-100 count as 0, so that no sum is subnormal.
constexpr uint32_t least_turned = (127u - 60) << 23, too_large = (127u + 117) << 23, least_element = (127u - 100) << 23;

/// Rounds half to even, to a finite value; numbers below 2^-126 become 0.
uint16_t spike_value(float x) {
    constexpr uint16_t largest = 0x7F7F;
    const uint16_t sign = bits_of(x) >> 16 & 0x8000u, magnitude = float_to_bfloat16(from_bits(magnitude_of(x)));
    return magnitude_of(x) < least_normal ? sign : static_cast<uint16_t>(sign | std::min(magnitude, largest));
}

/// Multiplies a power of two of elements by the Hadamard matrix of its size divided by that size's root. A pass adds
/// and subtracts neighbours and leaves sums in the lower half, differences in the upper: passes are the usual steps of
/// 1, 2, 4, ... elements, and after the last one all are in their places.
ALLTOALLV_INLINE void turn_block(float* x, size_t n, float* spare) {
    float *from = x, *to = spare;
    int passes = 0;
    for (size_t step = 1; step < n; step *= 2, ++passes) {
        const size_t half = n / 2;
        ALLTOALLV_INDEPENDENT
        for (size_t i = 0; i < half; ++i) {
            const float a = from[2 * i], b = from[2 * i + 1];
            to[i] = a + b;
            to[half + i] = a - b;
        }
        std::swap(from, to);
    }
    const uint32_t half_power = static_cast<uint32_t>(passes / 2) << 23;
    const float norm = from_bits((passes % 2 == 0 ? 0x3F800000u : 0x3F3504F3u) - half_power);  // 1, root of 1/2
    for (size_t i = 0; i < n; ++i) x[i] = from[i] * norm;
}

/// Rotates a group in blocks whose lengths are the binary digits of its own, the largest first.
ALLTOALLV_INLINE void turn(float* x, size_t n) {
    alignas(64) float spare[longest_shaped];
    for (size_t block = longest_shaped; block > 0; block /= 2) {
        if ((n & block) == 0) continue;
        turn_block(x, block, spare);
        x += block;
    }
}

ALLTOALLV_INLINE uint32_t largest_of(const float* x, size_t n) {
    int32_t most = 0;
    for (size_t k = 0; k < n; ++k) most = std::max(most, static_cast<int32_t>(magnitude_of(x[k])));
    return static_cast<uint32_t>(most);
}

ALLTOALLV_INLINE void turn_all(float* x, size_t count, size_t group_size, Bytes* turned) {
    each_group(count, group_size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
        alignas(64) float y[longest_shaped];
        const uint32_t most = largest_of(x + begin, n);
        turned[g] = 0;
        if (most < least_turned || most >= too_large) return;
        for (size_t k = 0; k < n; ++k) y[k] = magnitude_of(x[begin + k]) < least_element ? 0.0f : x[begin + k];
        turn(y, n);
        if (largest_of(y, n) >= most) return;
        turned[g] = 1;
        std::memcpy(x + begin, y, n * sizeof(float));
    });
}

ALLTOALLV_INLINE void turn_all_back(const float* scales, size_t count, size_t group_size, float* x) {
    each_group(count, group_size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
        const uint32_t bits = bits_of(scales[g]);
        if (bits >> 31 == 0 || (bits & 0x7FFFFFFFu) >= infinity_bits) return;
        turn(x + begin, n);
    });
}

constexpr auto& turn_by_isa = clones<turn_all>;
constexpr auto& turn_back_by_isa = clones<turn_all_back>;

}  // namespace

void take_spikes(float* x, size_t count, size_t group_size, Bytes* spikes) {
    each_group(count, group_size, [=](size_t begin, size_t n, size_t g) {
        Spike found[spikes_each];
        int64_t first = -1, second = -1;  // magnitudes
        size_t at = 0, then = 0;
        for (size_t k = 0; k < n; ++k) {
            const int64_t magnitude = magnitude_of(x[begin + k]);
            if (magnitude > first) {
                second = std::exchange(first, magnitude);
                then = std::exchange(at, k);
            } else if (magnitude > second) {
                second = magnitude;
                then = k;
            }
        }
        if (first < static_cast<int64_t>(infinity_bits)) {
            const auto take = [&](Spike& spike, size_t k) {
                spike = {static_cast<uint16_t>(k), spike_value(x[begin + k])};
                x[begin + k] = 0;
            };
            take(found[0], at);
            if (second >= 0) take(found[1], then);
        }
        std::memcpy(spikes + g * spiked_scale_bytes, found, sizeof found);
    });
}

void put_spikes(const Bytes* spikes, size_t count, size_t group_size, float* x) {
    each_group(count, group_size, [=](size_t begin, size_t n, size_t g) {
        Spike found[spikes_each];
        std::memcpy(found, spikes + g * spiked_scale_bytes, sizeof found);
        for (const Spike& spike : found)
            if (spike.index < n) x[begin + spike.index] = canonical_nan(bfloat16_to_float(spike.value));
    });
}

void turn_groups(float* x, size_t count, size_t group_size, Bytes* turned, Isa isa) {
    turn_by_isa[isa](x, count, group_size, turned);
}

void turn_back(const float* scales, size_t count, size_t group_size, float* x, Isa isa) {
    turn_back_by_isa[isa](scales, count, group_size, x);
}

}  // namespace alltoallv::kernel::quant
