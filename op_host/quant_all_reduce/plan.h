// How the kernels of the quantized pipeline divide their work: plain numbers.
#pragma once

#include <algorithm>
#include <cstdint>

namespace alltoallv {

/// Whole groups are divided among cores; more cores than groups would have nothing to do. At least 1.
constexpr uint32_t cores_for_groups(uint64_t count, uint64_t group, uint32_t cores) {
    const uint64_t groups = count / group + (count % group != 0);
    return static_cast<uint32_t>(std::clamp<uint64_t>(groups, 1, std::max<uint32_t>(cores, 1)));
}

}  // namespace alltoallv
