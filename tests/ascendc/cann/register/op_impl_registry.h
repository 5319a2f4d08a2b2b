// What our infer shape and tiling use of CANN's contexts, so that they run without it: a test fills a context, calls
// the function that is registered for an operator, and looks at what it has left. Written from what they use.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "register/op_def_registry.h"  // ge::DataType

namespace ge {

using graphStatus = uint32_t;
constexpr graphStatus GRAPH_SUCCESS = 0, GRAPH_FAILED = 0xFFFFFFFF;

}  // namespace ge

namespace gert {

class Shape {
  public:
    std::vector<int64_t> dims;
    size_t GetDimNum() const { return dims.size(); }
    int64_t GetDim(size_t i) const { return dims[i]; }
    void SetDimNum(size_t n) { dims.resize(n); }
    void SetDim(size_t i, int64_t value) { dims[i] = value; }
    int64_t GetShapeSize() const {
        int64_t size = 1;
        for (const int64_t dim : dims) size *= dim;
        return size;
    }
};

struct StorageShape {
    Shape storage;
    const Shape& GetStorageShape() const { return storage; }
};

struct CompileTimeTensorDesc {
    ge::DataType type;
    ge::DataType GetDataType() const { return type; }
};

struct RuntimeAttrs {
    std::vector<int64_t> values;  // 0 for a string
    const int64_t* GetInt(size_t i) const { return i < values.size() ? &values[i] : nullptr; }
    const bool* GetBool(size_t i) const { return reinterpret_cast<const bool*>(GetInt(i)); }
};

/// All that the three contexts have.
struct Context {
    std::vector<StorageShape> inputs, outputs;
    std::vector<CompileTimeTensorDesc> input_types, output_types;
    std::vector<bool> given;
    RuntimeAttrs attributes;
    uint32_t cores = 0;
    std::vector<char> tiling = std::vector<char>(4096);
    size_t tiling_bytes = 0, workspace = 0;
    uint32_t block_dim = 0;

    const RuntimeAttrs* GetAttrs() const { return &attributes; }
};

struct TilingContext : Context {
    const StorageShape* GetInputShape(size_t i) const { return &inputs[i]; }
    const StorageShape* GetOptionalInputShape(size_t i) const { return given[i] ? &inputs[i] : nullptr; }
    const StorageShape* GetOutputShape(size_t i) const { return &outputs[i]; }
    const CompileTimeTensorDesc* GetInputDesc(size_t i) const { return &input_types[i]; }
    const CompileTimeTensorDesc* GetOptionalInputDesc(size_t i) const { return given[i] ? &input_types[i] : nullptr; }
    const CompileTimeTensorDesc* GetOutputDesc(size_t i) const { return &output_types[i]; }
    template <class T>
    T* GetTilingData() {
        tiling_bytes = sizeof(T);
        return reinterpret_cast<T*>(tiling.data());
    }
    void SetBlockDim(uint32_t n) { block_dim = n; }
    size_t* GetWorkspaceSizes(size_t) { return &workspace; }
    const Context* GetPlatformInfo() const { return this; }
};

struct InferShapeContext : Context {
    const Shape* GetInputShape(size_t i) const { return &inputs[i].storage; }
    Shape* GetOutputShape(size_t i) { return &outputs[i].storage; }
};

struct InferDataTypeContext : Context {
    ge::DataType GetInputDataType(size_t i) const { return input_types[i].type; }
    void SetOutputDataType(size_t i, ge::DataType type) { output_types[i].type = type; }
};

struct TilingParseContext {};

/// What is registered for an operator.
struct Functions {
    ge::graphStatus (*shape)(InferShapeContext*) = nullptr;
    ge::graphStatus (*type)(InferDataTypeContext*) = nullptr;
    ge::graphStatus (*tiling)(TilingContext*) = nullptr;

    Functions& InferShape(ge::graphStatus (*f)(InferShapeContext*)) {
        shape = f;
        return *this;
    }
    Functions& InferDataType(ge::graphStatus (*f)(InferDataTypeContext*)) {
        type = f;
        return *this;
    }
    Functions& Tiling(ge::graphStatus (*f)(TilingContext*)) {
        tiling = f;
        return *this;
    }
    template <class Compiled>
    Functions& TilingParse(ge::graphStatus (*)(TilingParseContext*)) {
        return *this;
    }
};

inline std::map<std::string, Functions>& functions() {
    static std::map<std::string, Functions> all;
    return all;
}

}  // namespace gert

#define IMPL_OP_INFERSHAPE(Op) static gert::Functions& Op##_shapes = gert::functions()[#Op]
#define IMPL_OP_OPTILING(Op) static gert::Functions& Op##_tiling = gert::functions()[#Op]
