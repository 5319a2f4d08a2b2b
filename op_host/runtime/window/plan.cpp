#include "runtime/window/plan.h"

#include <algorithm>
#include <cstdlib>

#include "runtime/base/error.h"

namespace alltoallv {
namespace {

using namespace alltoallv_kernels;

constexpr uint64_t mib = 1 << 20;

/// The smallest HCCL_BUFFSIZE, in MB, that gives every peer a cell of each lane; a window has two such buffers.
uint64_t smallest_buffer(uint32_t ranks, uint32_t lanes) {
    uint64_t mb = 1;
    while (lane_bytes_of(2 * mb * mib, lanes) < static_cast<uint64_t>(ranks) * cell_bytes) ++mb;
    return mb;
}

/// HCCL's own limit of a collective, within what a kernel can count.
uint32_t wait_us() {
    const char* text = std::getenv("HCCL_EXEC_TIMEOUT");
    const double seconds = text == nullptr || *text == 0 ? 1836 : std::strtod(text, nullptr);
    return static_cast<uint32_t>(std::clamp(seconds, 1.0, 4000.0) * 1e6);
}

}  // namespace

WindowTiling plan_window(uint64_t window_bytes, uint32_t ranks, uint32_t cores) {
    if (ranks < 1 || ranks > most_ranks)
        throw invalid_param(1115, "the communicator has ", ranks, " ranks, expected 1 to ", most_ranks,
                            " for its kernels");
    if (cores < 1) throw invalid_param(1116, "the device has 0 vector cores, expected at least 1");
    const uint32_t lanes = std::min(cores, most_lanes);
    const uint64_t lane_bytes = lane_bytes_of(window_bytes, lanes);
    if (lane_bytes < static_cast<uint64_t>(ranks) * cell_bytes)
        throw invalid_param(1117, "the communicator's windows have ", window_bytes, " bytes, too few for ", ranks,
                            " ranks: set HCCL_BUFFSIZE to at least ", smallest_buffer(ranks, lanes));
    WindowTiling tiling{};
    tiling.size = ranks;
    tiling.lanes = lanes;
    tiling.wait_us = wait_us();
    tiling.lane_bytes = lane_bytes;
    return tiling;
}

uint64_t rounds_of(const WindowTiling& plan, uint64_t rows, uint64_t row_bytes) {
    const uint64_t slot = plan.lane_bytes / plan.size / cell_bytes * cell_bytes;
    const uint64_t cells = (rows * row_bytes + cell_bytes - 1) / cell_bytes;
    const uint64_t share = (cells + plan.lanes - 1) / plan.lanes * cell_bytes;
    return std::max<uint64_t>(1, (share + slot - 1) / slot);
}

}  // namespace alltoallv
