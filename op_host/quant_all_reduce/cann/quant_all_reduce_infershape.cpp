// Shapes and types of outputs, for CANN's graphs. Never compiled against CANN.
#include "quant_all_reduce/plan.h"
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

void set_vector(gert::Shape* shape, int64_t length) {
    shape->SetDimNum(1);
    shape->SetDim(0, length);
}

ge::graphStatus shape_of_codes(gert::InferShapeContext* context) {
    const gert::Shape* x = context->GetInputShape(0);
    gert::Shape *codes = context->GetOutputShape(0), *scales = context->GetOutputShape(1);
    const int64_t *bits = context->GetAttrs()->GetInt(0), *group_size = context->GetAttrs()->GetInt(1);
    if (x == nullptr || codes == nullptr || scales == nullptr || group_size == nullptr || *group_size < 1 ||
        bits == nullptr || (*bits != 8 && *bits != 4))
        return ge::GRAPH_FAILED;
    const int64_t count = elements(*x);
    const auto known_count = static_cast<uint64_t>(count), group = static_cast<uint64_t>(*group_size);
    *codes = *x;
    if (*bits == 4)
        set_vector(codes, count < 0 ? -1 : static_cast<int64_t>(alltoallv::code_bytes_of(known_count, group, 4)));
    set_vector(scales, count < 0 ? -1 : static_cast<int64_t>((known_count + group - 1) / group));
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
    const int64_t* count = context->GetAttrs()->GetInt(3);
    if (codes == nullptr || out == nullptr || codes->GetDimNum() != 2 || count == nullptr || *count < 0)
        return ge::GRAPH_FAILED;
    set_vector(out, *count);
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus type_of_sum(gert::InferDataTypeContext* context) {
    const int64_t* dtype = context->GetAttrs()->GetInt(2);
    if (dtype == nullptr) return ge::GRAPH_FAILED;
    context->SetOutputDataType(0, static_cast<ge::DataType>(*dtype));  // ge's numbers are ACL's
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus shape_of_shared_sum(gert::InferShapeContext* context) {
    const gert::Shape *x = context->GetInputShape(0), *scale = context->GetInputShape(1);
    gert::Shape* out = context->GetOutputShape(0);
    if (x == nullptr || scale == nullptr || out == nullptr || x->GetDimNum() != 2) return ge::GRAPH_FAILED;
    set_vector(out, x->GetDim(1));
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus type_of_shared_sum(gert::InferDataTypeContext* context) {
    const int64_t* dtype = context->GetAttrs()->GetInt(0);
    if (dtype == nullptr) return ge::GRAPH_FAILED;
    context->SetOutputDataType(0, static_cast<ge::DataType>(*dtype));
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus shape_of_all_reduce(gert::InferShapeContext* context) {
    const gert::Shape* x = context->GetInputShape(0);
    gert::Shape *out = context->GetOutputShape(0), *status = context->GetOutputShape(1);
    if (x == nullptr || out == nullptr || status == nullptr) return ge::GRAPH_FAILED;
    *out = *x;
    set_vector(status, int64_t{alltoallv_kernels::most_lanes} * alltoallv_kernels::status_words);
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus type_of_all_reduce(gert::InferDataTypeContext* context) {
    const int64_t* dtype = context->GetAttrs()->GetInt(6);
    if (dtype == nullptr) return ge::GRAPH_FAILED;
    context->SetOutputDataType(0, static_cast<ge::DataType>(*dtype));
    context->SetOutputDataType(1, ge::DT_INT32);
    return ge::GRAPH_SUCCESS;
}

}  // namespace

IMPL_OP_INFERSHAPE(AlltoallvQuantize).InferShape(shape_of_codes).InferDataType(type_of_codes);
IMPL_OP_INFERSHAPE(AlltoallvDequantizeSum).InferShape(shape_of_sum).InferDataType(type_of_sum);
IMPL_OP_INFERSHAPE(AlltoallvSharedScaleSum).InferShape(shape_of_shared_sum).InferDataType(type_of_shared_sum);
IMPL_OP_INFERSHAPE(AlltoallvQuantAllReduce).InferShape(shape_of_all_reduce).InferDataType(type_of_all_reduce);
