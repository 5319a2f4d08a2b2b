// What formats do to groups before they are encoded, and undo after they are decoded: spikes are taken out, and groups
// are rotated. docs/quantization.md has the definitions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "op_kernel/cpu/clones.h"
#include "op_kernel/cpu/elements.h"
#include "runtime/base/code_format.h"

namespace alltoallv::kernel::quant {

/// An element of a group that is kept apart.
struct Spike {
    uint16_t index = 0xFFFF, value = 0;  // in the group; bfloat16
};
static_assert(sizeof(Spike[spikes_each]) == spike_bytes);

/// Where spikes lie: a record of scales has one entry of so many bytes per group, the float32 scale before the spikes.
constexpr size_t spiked_scale_bytes = sizeof(float) + spike_bytes;

/// Takes the spikes out of each group of `x`, which become 0. The spikes of group g are written to
/// `spikes + g * spiked_scale_bytes`. Groups with inf or NaN have none.
void take_spikes(float* x, size_t count, size_t group_size, Bytes* spikes);
/// Puts them back; entries whose index is outside of their group mean nothing.
void put_spikes(const Bytes* spikes, size_t count, size_t group_size, float* x);

/// Rotates the groups whose largest magnitude that makes smaller, and sets the others' `turned` to 0.
void turn_groups(float* x, size_t count, size_t group_size, Bytes* turned, Isa isa);
/// Rotates the groups back whose scales are negative and finite.
void turn_back(const float* scales, size_t count, size_t group_size, float* x, Isa isa);

}  // namespace alltoallv::kernel::quant
