// Tiling of the two local operators for CANN: op_host/quant_all_reduce/plan.h in the structs that the kernels read.
// Never compiled against CANN.
#include "op_kernel/ascendc/quantized_tiling.h"
#include "quant_all_reduce/plan.h"
#include "register/op_impl_registry.h"
#include "tiling/platform/platform_ascendc.h"

namespace {

struct Compiled {};

ge::graphStatus parse(gert::TilingParseContext*) {
    return ge::GRAPH_SUCCESS;
}

uint64_t elements(const gert::StorageShape* shape) {
    return static_cast<uint64_t>(shape->GetStorageShape().GetShapeSize());
}

ge::graphStatus finish(gert::TilingContext* context, uint64_t count, uint64_t group) {
    platform_ascendc::PlatformAscendC platform(context->GetPlatformInfo());
    context->SetBlockDim(alltoallv::cores_for_groups(count, group, platform.GetCoreNumAiv()));
    context->GetWorkspaceSizes(1)[0] = platform.GetLibApiWorkSpaceSize();
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus tile_quantize(gert::TilingContext* context) {
    auto* tiling = context->GetTilingData<alltoallv_kernels::QuantizeTiling>();
    const int64_t* group = context->GetAttrs()->GetInt(0);
    if (tiling == nullptr || group == nullptr || *group < 1) return ge::GRAPH_FAILED;
    *tiling = {};
    tiling->bits = 8;
    tiling->count = elements(context->GetInputShape(0));
    tiling->group = static_cast<uint64_t>(*group);
    tiling->type = static_cast<uint32_t>(context->GetInputDesc(0)->GetDataType());
    return finish(context, tiling->count, tiling->group);
}

ge::graphStatus tile_dequantize_sum(gert::TilingContext* context) {
    auto* tiling = context->GetTilingData<alltoallv_kernels::DequantizeSumTiling>();
    const int64_t* group = context->GetAttrs()->GetInt(0);
    const gert::StorageShape* codes = context->GetInputShape(0);
    if (tiling == nullptr || group == nullptr || *group < 1 || codes->GetStorageShape().GetDimNum() != 2)
        return ge::GRAPH_FAILED;
    *tiling = {};
    tiling->bits = 8;
    tiling->ranks = static_cast<uint32_t>(codes->GetStorageShape().GetDim(0));
    tiling->count = static_cast<uint64_t>(codes->GetStorageShape().GetDim(1));
    tiling->group = static_cast<uint64_t>(*group);
    tiling->type = static_cast<uint32_t>(context->GetOutputDesc(0)->GetDataType());
    tiling->saturate = 1;
    return finish(context, tiling->count, tiling->group);
}

}  // namespace

IMPL_OP_OPTILING(AlltoallvQuantize).Tiling(tile_quantize).TilingParse<Compiled>(parse);
IMPL_OP_OPTILING(AlltoallvDequantizeSum).Tiling(tile_dequantize_sum).TilingParse<Compiled>(parse);
