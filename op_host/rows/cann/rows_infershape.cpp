// Shapes and types of outputs, for CANN's graphs. Never compiled against CANN.
#include "register/op_impl_registry.h"

namespace {

/// Rows shaped as x's, so many.
ge::graphStatus rows_like_x(gert::InferShapeContext* context, int64_t rows) {
    const gert::Shape *x = context->GetInputShape(0), *index = context->GetInputShape(1);
    gert::Shape* out = context->GetOutputShape(0);
    if (x == nullptr || index == nullptr || out == nullptr || x->GetDimNum() == 0 || index->GetDimNum() != 1)
        return ge::GRAPH_FAILED;
    *out = *x;
    out->SetDim(0, rows);
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus shape_of_gathered(gert::InferShapeContext* context) {
    const gert::Shape* index = context->GetInputShape(1);
    if (index == nullptr || index->GetDimNum() != 1) return ge::GRAPH_FAILED;
    return rows_like_x(context, index->GetDim(0));
}

ge::graphStatus shape_of_scattered(gert::InferShapeContext* context) {
    const int64_t* rows = context->GetAttrs()->GetInt(0);
    return rows == nullptr || *rows < 0 ? ge::GRAPH_FAILED : rows_like_x(context, *rows);
}

ge::graphStatus type_of_x(gert::InferDataTypeContext* context) {
    context->SetOutputDataType(0, context->GetInputDataType(0));
    return ge::GRAPH_SUCCESS;
}

}  // namespace

IMPL_OP_INFERSHAPE(AlltoallvGatherRows).InferShape(shape_of_gathered).InferDataType(type_of_x);
IMPL_OP_INFERSHAPE(AlltoallvScatterRows).InferShape(shape_of_scattered).InferDataType(type_of_x);
