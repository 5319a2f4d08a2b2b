// Tiling of the operators that move rows by indices, for CANN: the plan of op_host/rows/plan.h. Never compiled against
// CANN.
#include "rows/plan.h"
#include "runtime/cann/tiling.h"

namespace {

ge::graphStatus tile_rows(gert::TilingContext* context) {
    const gert::Shape &x = context->GetInputShape(0)->GetStorageShape(),
                      &index = context->GetInputShape(1)->GetStorageShape(),
                      &out = context->GetOutputShape(0)->GetStorageShape();
    if (x.GetDimNum() == 0 || out.GetDimNum() == 0) return ge::GRAPH_FAILED;
    const auto rows = [](const gert::Shape& shape) { return static_cast<uint64_t>(shape.GetDim(0)); };
    return alltoallv::cann::finish(
        context, alltoallv::plan_rows(static_cast<uint64_t>(index.GetShapeSize()),
                                      alltoallv::cann::row_bytes(x, context->GetInputDesc(0)->GetDataType()), rows(x),
                                      rows(out), alltoallv::cann::vector_cores(context)));
}

}  // namespace

IMPL_OP_OPTILING(AlltoallvGatherRows).Tiling(tile_rows).TilingParse<alltoallv::cann::Compiled>(alltoallv::cann::parse);
IMPL_OP_OPTILING(AlltoallvScatterRows).Tiling(tile_rows).TilingParse<alltoallv::cann::Compiled>(alltoallv::cann::parse);
