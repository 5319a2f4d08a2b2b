// Tiling of all-to-all-v with counts in device memory, for CANN. Never compiled against CANN.
#include "op_kernel/ascendc/all_to_all_v_tiling.h"
#include "all_to_all_v/cann/communication_tiling.h"

namespace {

ge::graphStatus tile_exchange(gert::TilingContext* context) {
    const gert::Shape &x = context->GetInputShape(0)->GetStorageShape(),
                      &out = context->GetOutputShape(0)->GetStorageShape();
    const bool* expects = context->GetAttrs()->GetBool(1);
    if (x.GetDimNum() == 0 || out.GetDimNum() == 0 || expects == nullptr) return ge::GRAPH_FAILED;
    alltoallv_kernels::AllToAllVTiling tiling{};
    tiling.row_bytes = alltoallv::cann::row_bytes(x, context->GetInputDesc(0)->GetDataType());
    tiling.input_rows = static_cast<uint64_t>(x.GetDim(0));
    tiling.output_rows = static_cast<uint64_t>(out.GetDim(0));
    tiling.has_sdispls = context->GetOptionalInputShape(2) != nullptr;
    tiling.expects = *expects;
    return alltoallv::cann::finish(context, tiling, context->GetInputShape(1)->GetStorageShape().GetShapeSize());
}

}  // namespace

IMPL_OP_OPTILING(AlltoallvAllToAllV)
    .Tiling(tile_exchange)
    .TilingParse<alltoallv::cann::Compiled>(alltoallv::cann::parse);
