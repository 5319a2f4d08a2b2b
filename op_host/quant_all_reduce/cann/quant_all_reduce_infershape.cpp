// Shapes and types of outputs, for CANN's graphs. Never compiled against CANN.
#include "register/op_impl_registry.h"

namespace {

/// Returns how many elements the shape has, -1 if a dimension is not known yet.
int64_t elements(const gert::Shape& shape) {
    int64_t count = 1;
    for (size_t i = 0; i < shape.GetDimNum(); ++i) {
        if (shape.GetDim(i) < 0) return -1;
        count *= shape.GetDim(i);
    }
    return count;
}

ge::graphStatus shape_of_codes(gert::InferShapeContext* context) {
    const gert::Shape* x = context->GetInputShape(0);
    gert::Shape *codes = context->GetOutputShape(0), *scales = context->GetOutputShape(1);
    const int64_t* group_size = context->GetAttrs()->GetInt(0);
    if (x == nullptr || codes == nullptr || scales == nullptr || group_size == nullptr || *group_size < 1)
        return ge::GRAPH_FAILED;
    *codes = *x;
    const int64_t count = elements(*x);
    scales->SetDimNum(1);
    scales->SetDim(0, count < 0 ? -1 : (count + *group_size - 1) / *group_size);
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus type_of_codes(gert::InferDataTypeContext* context) {
    context->SetOutputDataType(0, ge::DT_INT8);
    context->SetOutputDataType(1, ge::DT_FLOAT);
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus shape_of_sum(gert::InferShapeContext* context) {
    const gert::Shape* codes = context->GetInputShape(0);
    gert::Shape* out = context->GetOutputShape(0);
    if (codes == nullptr || out == nullptr || codes->GetDimNum() != 2) return ge::GRAPH_FAILED;
    out->SetDimNum(1);
    out->SetDim(0, codes->GetDim(1));
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus type_of_sum(gert::InferDataTypeContext* context) {
    const int64_t* dtype = context->GetAttrs()->GetInt(1);
    if (dtype == nullptr) return ge::GRAPH_FAILED;
    context->SetOutputDataType(0, static_cast<ge::DataType>(*dtype));  // ge's numbers are ACL's
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus shape_of_input(gert::InferShapeContext* context) {
    const gert::Shape* x = context->GetInputShape(0);
    gert::Shape* out = context->GetOutputShape(0);
    if (x == nullptr || out == nullptr) return ge::GRAPH_FAILED;
    *out = *x;
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus type_of_input(gert::InferDataTypeContext* context) {
    context->SetOutputDataType(0, context->GetInputDataType(0));
    return ge::GRAPH_SUCCESS;
}

}  // namespace

IMPL_OP_INFERSHAPE(AlltoallvQuantize).InferShape(shape_of_codes).InferDataType(type_of_codes);
IMPL_OP_INFERSHAPE(AlltoallvDequantizeSum).InferShape(shape_of_sum).InferDataType(type_of_sum);
IMPL_OP_INFERSHAPE(AlltoallvQuantAllReduce).InferShape(shape_of_input).InferDataType(type_of_input);
