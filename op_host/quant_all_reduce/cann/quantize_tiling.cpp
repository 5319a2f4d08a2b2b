// Tiling of the two local operators for CANN: the plans of op_host/quant_all_reduce/plan.h. Never compiled against
// CANN.
#include "quant_all_reduce/plan.h"
#include "register/op_impl_registry.h"
#include "tiling/platform/platform_ascendc.h"

namespace {

struct Compiled {};

ge::graphStatus parse(gert::TilingParseContext*) {
    return ge::GRAPH_SUCCESS;
}

uint32_t vector_cores(gert::TilingContext* context) {
    return platform_ascendc::PlatformAscendC(context->GetPlatformInfo()).GetCoreNumAiv();
}

template <class Tiling>
ge::graphStatus finish(gert::TilingContext* context, const alltoallv::Plan<Tiling>& plan) {
    auto* tiling = context->GetTilingData<Tiling>();
    if (tiling == nullptr) return ge::GRAPH_FAILED;
    *tiling = plan.tiling;
    context->SetBlockDim(plan.cores);
    context->GetWorkspaceSizes(1)[0] =
        platform_ascendc::PlatformAscendC(context->GetPlatformInfo()).GetLibApiWorkSpaceSize();
    return ge::GRAPH_SUCCESS;
}

bool is_known(const int64_t* group, const int64_t* bits) {
    return group != nullptr && *group >= 1 && bits != nullptr && (*bits == 8 || *bits == 4);
}

ge::graphStatus tile_quantize(gert::TilingContext* context) {
    const int64_t *group = context->GetAttrs()->GetInt(0), *bits = context->GetAttrs()->GetInt(1);
    if (!is_known(group, bits)) return ge::GRAPH_FAILED;
    const int64_t count = context->GetInputShape(0)->GetStorageShape().GetShapeSize();
    const auto type = static_cast<uint32_t>(context->GetInputDesc(0)->GetDataType());
    return finish(context, alltoallv::plan_quantize(static_cast<uint64_t>(count), static_cast<uint64_t>(*group), type,
                                                    static_cast<uint32_t>(*bits), vector_cores(context)));
}

ge::graphStatus tile_dequantize_sum(gert::TilingContext* context) {
    const int64_t *group = context->GetAttrs()->GetInt(0), *bits = context->GetAttrs()->GetInt(1);
    const gert::StorageShape* codes = context->GetInputShape(0);
    if (!is_known(group, bits) || codes->GetStorageShape().GetDimNum() != 2) return ge::GRAPH_FAILED;
    const int64_t count = context->GetOutputShape(0)->GetStorageShape().GetShapeSize();
    return finish(context,
                  alltoallv::plan_dequantize_sum(static_cast<uint32_t>(codes->GetStorageShape().GetDim(0)),
                                                 static_cast<uint64_t>(count), static_cast<uint64_t>(*group),
                                                 static_cast<uint32_t>(context->GetOutputDesc(0)->GetDataType()),
                                                 static_cast<uint32_t>(*bits), true, false, vector_cores(context)));
}

}  // namespace

IMPL_OP_OPTILING(AlltoallvQuantize).Tiling(tile_quantize).TilingParse<Compiled>(parse);
IMPL_OP_OPTILING(AlltoallvDequantizeSum).Tiling(tile_dequantize_sum).TilingParse<Compiled>(parse);
