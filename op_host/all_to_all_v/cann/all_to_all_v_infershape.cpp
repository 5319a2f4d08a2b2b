// Shapes and types of outputs, for CANN's graphs. Never compiled against CANN.
#include "op_kernel/ascendc/window.h"
#include "register/op_impl_registry.h"

namespace {

/// The output has `capacity` rows shaped as x's; received counts are as many as sent ones.
ge::graphStatus shapes(gert::InferShapeContext* context) {
    const gert::Shape *x = context->GetInputShape(0), *counts = context->GetInputShape(1);
    gert::Shape *out = context->GetOutputShape(0), *received = context->GetOutputShape(1);
    gert::Shape* status = context->GetOutputShape(2);
    // Attributes in the order of the definition: group, expects, capacity.
    const int64_t* capacity = context->GetAttrs()->GetInt(2);
    if (x == nullptr || counts == nullptr || out == nullptr || received == nullptr || status == nullptr ||
        capacity == nullptr || *capacity < 0 || x->GetDimNum() == 0)
        return ge::GRAPH_FAILED;
    *out = *x;
    out->SetDim(0, *capacity);
    *received = *counts;
    status->SetDimNum(1);
    status->SetDim(0, int64_t{alltoallv_kernels::most_lanes} * alltoallv_kernels::status_words);
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus types(gert::InferDataTypeContext* context) {
    context->SetOutputDataType(0, context->GetInputDataType(0));
    context->SetOutputDataType(1, ge::DT_INT64);
    context->SetOutputDataType(2, ge::DT_INT32);
    return ge::GRAPH_SUCCESS;
}

}  // namespace

IMPL_OP_INFERSHAPE(AlltoallvAllToAllV).InferShape(shapes).InferDataType(types);
