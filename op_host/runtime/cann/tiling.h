// What the tilings for CANN have in common. Never compiled against CANN.
#pragma once

#include <cstdint>

#include "register/op_impl_registry.h"
#include "tiling/platform/platform_ascendc.h"

namespace alltoallv::cann {

struct Compiled {};

inline ge::graphStatus parse(gert::TilingParseContext*) {
    return ge::GRAPH_SUCCESS;
}

inline uint32_t vector_cores(gert::TilingContext* context) {
    return platform_ascendc::PlatformAscendC(context->GetPlatformInfo()).GetCoreNumAiv();
}

/// Bytes of an element of the types that our definitions move.
inline uint64_t bytes_of(ge::DataType type) {
    switch (type) {
        case ge::DT_INT8:
            return 1;
        case ge::DT_FLOAT16:
        case ge::DT_BF16:
        case ge::DT_INT16:
            return 2;
        case ge::DT_INT64:
            return 8;
        default:
            return 4;  // the definitions have no others
    }
}

inline uint64_t row_bytes(const gert::Shape& x, ge::DataType type) {
    uint64_t bytes = bytes_of(type);
    for (size_t i = 1; i < x.GetDimNum(); ++i) bytes *= static_cast<uint64_t>(x.GetDim(i));
    return bytes;
}

/// Hands a plan, which is what the kernel is told and its cores, to CANN.
template <class Plan>
ge::graphStatus finish(gert::TilingContext* context, const Plan& plan) {
    auto* tiling = context->GetTilingData<decltype(plan.tiling)>();
    if (tiling == nullptr) return ge::GRAPH_FAILED;
    *tiling = plan.tiling;
    context->SetBlockDim(plan.cores);
    context->GetWorkspaceSizes(1)[0] =
        platform_ascendc::PlatformAscendC(context->GetPlatformInfo()).GetLibApiWorkSpaceSize();
    return ge::GRAPH_SUCCESS;
}

}  // namespace alltoallv::cann
