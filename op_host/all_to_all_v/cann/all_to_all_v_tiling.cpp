// Tiling of all-to-all-v with counts in device memory, for CANN. Never compiled against CANN.
#include "op_kernel/ascendc/all_to_all_v_tiling.h"
#include "all_to_all_v/cann/communication_tiling.h"

namespace {

uint64_t bytes_of(ge::DataType type) {
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
            return 4;  // the definition has no others
    }
}

ge::graphStatus tile(gert::TilingContext* context) {
    const gert::Shape &x = context->GetInputShape(0)->GetStorageShape(),
                      &out = context->GetOutputShape(0)->GetStorageShape();
    if (x.GetDimNum() == 0 || out.GetDimNum() == 0) return ge::GRAPH_FAILED;
    alltoallv_kernels::AllToAllVTiling tiling{};
    tiling.row_bytes = bytes_of(context->GetInputDesc(0)->GetDataType());
    for (size_t i = 1; i < x.GetDimNum(); ++i) tiling.row_bytes *= static_cast<uint64_t>(x.GetDim(i));
    tiling.input_rows = static_cast<uint64_t>(x.GetDim(0));
    tiling.output_rows = static_cast<uint64_t>(out.GetDim(0));
    tiling.has_sdispls = context->GetOptionalInputShape(2) != nullptr;
    return alltoallv::cann::finish(context, tiling, context->GetInputShape(1)->GetStorageShape().GetShapeSize());
}

}  // namespace

IMPL_OP_OPTILING(AlltoallvAllToAllV).Tiling(tile).TilingParse<alltoallv::cann::Compiled>(alltoallv::cann::parse);
