// Tiling of an operator that communicates, for CANN: places in windows by op_host/runtime/window/plan.h. This rank and
// the addresses of the windows are left to the kernel, to which CANN's framework gives them. Never compiled against
// CANN.
#pragma once

#include <cstdlib>
#include <exception>

#include "register/op_impl_registry.h"
#include "runtime/window/plan.h"
#include "tiling/platform/platform_ascendc.h"

namespace alltoallv::cann {

struct Compiled {};

inline ge::graphStatus parse(gert::TilingParseContext*) {
    return ge::GRAPH_SUCCESS;
}

/// A window is two buffers of HCCL_BUFFSIZE, in MB, 200 unless it is set.
inline uint64_t window_bytes() {
    const char* text = std::getenv("HCCL_BUFFSIZE");
    const uint64_t mb = text == nullptr || *text == 0 ? 200 : std::strtoull(text, nullptr, 10);
    return (2 * mb) << 20;
}

/// Fills in the windows, of which `tiling` has no more yet, and how the kernel starts.
template <class Tiling>
ge::graphStatus finish(gert::TilingContext* context, Tiling tiling, int64_t ranks) {
    auto* result = context->GetTilingData<Tiling>();
    if (result == nullptr || ranks < 1 || ranks > alltoallv_kernels::most_ranks) return ge::GRAPH_FAILED;
    platform_ascendc::PlatformAscendC platform(context->GetPlatformInfo());
    try {
        tiling.window = plan_window(window_bytes(), static_cast<uint32_t>(ranks), platform.GetCoreNumAiv());
    } catch (const std::exception&) {
        return ge::GRAPH_FAILED;
    }
    *result = tiling;
    context->SetBlockDim(tiling.window.lanes);
    context->GetWorkspaceSizes(1)[0] = platform.GetLibApiWorkSpaceSize();
    return ge::GRAPH_SUCCESS;
}

}  // namespace alltoallv::cann
