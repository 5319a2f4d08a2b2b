// Tiling of the quantized all-reduce between ranks, for CANN. Never compiled against CANN.
#include "all_to_all_v/cann/communication_tiling.h"
#include "op_kernel/ascendc/quantized_tiling.h"

namespace {

ge::graphStatus tile_all_reduce(gert::TilingContext* context) {
    // Attributes in the order of the definition: group, bits, group_size, average, saturate, world_size.
    const auto* attributes = context->GetAttrs();
    const int64_t *bits = attributes->GetInt(1), *group = attributes->GetInt(2), *ranks = attributes->GetInt(5);
    const bool *average = attributes->GetBool(3), *saturate = attributes->GetBool(4);
    const gert::StorageShape* scale = context->GetOptionalInputShape(1);
    const bool shares_scale = scale != nullptr;
    if (ranks == nullptr || group == nullptr || *group < 1 || bits == nullptr || (*bits != 8 && *bits != 4) ||
        average == nullptr || saturate == nullptr || (shares_scale && *average))
        return ge::GRAPH_FAILED;
    alltoallv_kernels::QuantAllReduceTiling tiling{};
    tiling.count = static_cast<uint64_t>(context->GetInputShape(0)->GetStorageShape().GetShapeSize());
    tiling.group = shares_scale ? 0 : static_cast<uint64_t>(*group);
    tiling.channels = shares_scale ? static_cast<uint64_t>(scale->GetStorageShape().GetShapeSize()) : 1;
    tiling.type = static_cast<uint32_t>(context->GetInputDesc(0)->GetDataType());
    tiling.output_type = static_cast<uint32_t>(context->GetOutputDesc(0)->GetDataType());
    if (shares_scale) tiling.scale_type = static_cast<uint32_t>(context->GetOptionalInputDesc(1)->GetDataType());
    tiling.saturate = *saturate;
    tiling.average = *average;
    tiling.bits = shares_scale ? 8 : static_cast<uint32_t>(*bits);
    return alltoallv::cann::finish(context, tiling, *ranks);
}

}  // namespace

IMPL_OP_OPTILING(AlltoallvQuantAllReduce)
    .Tiling(tile_all_reduce)
    .TilingParse<alltoallv::cann::Compiled>(alltoallv::cann::parse);
