// Calls what is registered for an operator, from Python.
#include "register/op_impl_registry.h"

namespace {

template <class Context>
Context made(int inputs, const int64_t* shapes, const int* types, int outputs, const int64_t* attributes, int count,
             uint32_t cores) {
    Context context;
    for (int i = 0; i < inputs; ++i) {  // shapes: dimensions, then their sizes; -1 dimensions: not given
        const int64_t n = *shapes++;
        context.given.push_back(n >= 0);
        context.inputs.emplace_back();
        for (int64_t k = 0; k < n; ++k) context.inputs.back().storage.dims.push_back(*shapes++);
        context.input_types.push_back({static_cast<ge::DataType>(types[i])});
    }
    context.outputs.resize(static_cast<size_t>(outputs));
    context.output_types.resize(static_cast<size_t>(outputs));
    context.attributes.values.assign(attributes, attributes + count);
    context.cores = cores;
    return context;
}

}  // namespace

/// Infers shapes and types of outputs, then tiles. Outputs: `result` is filled with the dimensions of each, then their
/// sizes, then its type; then the cores; `tiling` with the bytes that are returned, negative if a function refuses.
extern "C" int alltoallv_cann_run(const char* op, int inputs, const int64_t* shapes, const int* types, int outputs,
                                  const int64_t* attributes, int count, uint32_t cores, int64_t* result, char* tiling) {
    const gert::Functions& f = gert::functions().at(op);
    auto shape = made<gert::InferShapeContext>(inputs, shapes, types, outputs, attributes, count, cores);
    auto type = made<gert::InferDataTypeContext>(inputs, shapes, types, outputs, attributes, count, cores);
    auto tile = made<gert::TilingContext>(inputs, shapes, types, outputs, attributes, count, cores);
    if (f.shape(&shape) != ge::GRAPH_SUCCESS) return -1;
    if (f.type(&type) != ge::GRAPH_SUCCESS) return -2;
    for (size_t i = 0; i < shape.outputs.size(); ++i) {
        const gert::Shape& dims = shape.outputs[i].storage;
        *result++ = static_cast<int64_t>(dims.GetDimNum());
        for (const int64_t dim : dims.dims) *result++ = dim;
        *result++ = type.output_types[i].type;
    }
    tile.outputs = shape.outputs;
    tile.output_types = type.output_types;
    if (f.tiling(&tile) != ge::GRAPH_SUCCESS) return -3;
    *result = tile.block_dim;
    std::memcpy(tiling, tile.tiling.data(), tile.tiling_bytes);
    return static_cast<int>(tile.tiling_bytes);
}
