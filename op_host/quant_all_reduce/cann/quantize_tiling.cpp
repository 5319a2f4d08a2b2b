// Tiling of the local operators for CANN: the plans of op_host/quant_all_reduce/plan.h. Never compiled against CANN.
#include "quant_all_reduce/plan.h"
#include "runtime/cann/tiling.h"

namespace {

using namespace alltoallv::cann;

bool is_known(const int64_t* group, const int64_t* bits) {
    return group != nullptr && *group >= 1 && bits != nullptr && (*bits == 8 || *bits == 4);
}

ge::graphStatus tile_quantize(gert::TilingContext* context) {
    const int64_t *bits = context->GetAttrs()->GetInt(0), *group = context->GetAttrs()->GetInt(1);
    if (!is_known(group, bits)) return ge::GRAPH_FAILED;
    const int64_t count = context->GetInputShape(0)->GetStorageShape().GetShapeSize();
    const auto type = static_cast<uint32_t>(context->GetInputDesc(0)->GetDataType());
    return finish(context, alltoallv::plan_quantize(static_cast<uint64_t>(count), static_cast<uint64_t>(*group), type,
                                                    static_cast<uint32_t>(*bits), vector_cores(context)));
}

ge::graphStatus tile_dequantize_sum(gert::TilingContext* context) {
    const int64_t *bits = context->GetAttrs()->GetInt(0), *group = context->GetAttrs()->GetInt(1);
    const gert::StorageShape* codes = context->GetInputShape(0);
    if (!is_known(group, bits) || codes->GetStorageShape().GetDimNum() != 2) return ge::GRAPH_FAILED;
    const int64_t count = context->GetOutputShape(0)->GetStorageShape().GetShapeSize();
    return finish(context,
                  alltoallv::plan_dequantize_sum(static_cast<uint32_t>(codes->GetStorageShape().GetDim(0)),
                                                 static_cast<uint64_t>(count), static_cast<uint64_t>(*group),
                                                 static_cast<uint32_t>(context->GetOutputDesc(0)->GetDataType()),
                                                 static_cast<uint32_t>(*bits), true, false, vector_cores(context)));
}

ge::graphStatus tile_shared_scale_sum(gert::TilingContext* context) {
    const gert::Shape& x = context->GetInputShape(0)->GetStorageShape();
    const int64_t channels = context->GetInputShape(1)->GetStorageShape().GetShapeSize();
    if (x.GetDimNum() != 2 || channels < 1) return ge::GRAPH_FAILED;
    return finish(context,
                  alltoallv::plan_shared_scale_sum(
                      static_cast<uint32_t>(x.GetDim(0)), static_cast<uint64_t>(x.GetDim(1)),
                      static_cast<uint64_t>(channels), static_cast<uint32_t>(context->GetOutputDesc(0)->GetDataType()),
                      static_cast<uint32_t>(context->GetInputDesc(1)->GetDataType()), true, vector_cores(context)));
}

}  // namespace

IMPL_OP_OPTILING(AlltoallvQuantize).Tiling(tile_quantize).TilingParse<Compiled>(parse);
IMPL_OP_OPTILING(AlltoallvDequantizeSum).Tiling(tile_dequantize_sum).TilingParse<Compiled>(parse);
IMPL_OP_OPTILING(AlltoallvSharedScaleSum).Tiling(tile_shared_scale_sum).TilingParse<Compiled>(parse);
