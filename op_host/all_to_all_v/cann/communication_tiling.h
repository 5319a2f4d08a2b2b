// Tiling of an operator that communicates, for CANN: places in windows by op_host/runtime/window/plan.h. This rank and
// the addresses of the windows are left to the kernel, to which CANN's framework gives them. Never compiled against
// CANN.
#pragma once

#include <cstdlib>
#include <exception>

#include "runtime/cann/tiling.h"
#include "runtime/window/plan.h"

namespace alltoallv::cann {

/// A window is two buffers of HCCL_BUFFSIZE, in MB, 200 unless it is set.
inline uint64_t window_bytes() {
    const char* text = std::getenv("HCCL_BUFFSIZE");
    const uint64_t mb = text == nullptr || *text == 0 ? 200 : std::strtoull(text, nullptr, 10);
    return (2 * mb) << 20;
}

/// Fills in the windows, of which `tiling` has no more yet, and how the kernel starts.
template <class Tiling>
ge::graphStatus finish(gert::TilingContext* context, Tiling tiling, int64_t ranks) {
    if (ranks < 1 || ranks > alltoallv_kernels::most_ranks) return ge::GRAPH_FAILED;
    try {
        tiling.window = plan_window(window_bytes(), static_cast<uint32_t>(ranks), vector_cores(context));
    } catch (const std::exception&) {
        return ge::GRAPH_FAILED;
    }
    struct {
        Tiling tiling;
        uint32_t cores;
    } const plan{tiling, tiling.window.lanes};
    return finish(context, plan);
}

}  // namespace alltoallv::cann
