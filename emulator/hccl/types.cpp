#include "hccl/types.h"

#include <optional>

#include "runtime/failure.h"

namespace alltoallv::emulator {
namespace {

struct Type {
    HcclDataType type;
    const char* name;
    size_t size;
    std::optional<DType> reduces;
};

constexpr Type types[] = {
    {HCCL_DATA_TYPE_INT8, "int8", 1, DType::int8},
    {HCCL_DATA_TYPE_INT16, "int16", 2, DType::int16},
    {HCCL_DATA_TYPE_INT32, "int32", 4, DType::int32},
    {HCCL_DATA_TYPE_FP16, "fp16", 2, DType::float16},
    {HCCL_DATA_TYPE_FP32, "fp32", 4, DType::float32},
    {HCCL_DATA_TYPE_INT64, "int64", 8, DType::int64},
    {HCCL_DATA_TYPE_UINT64, "uint64", 8, {}},
    {HCCL_DATA_TYPE_UINT8, "uint8", 1, {}},
    {HCCL_DATA_TYPE_UINT16, "uint16", 2, {}},
    {HCCL_DATA_TYPE_UINT32, "uint32", 4, {}},
    {HCCL_DATA_TYPE_FP64, "fp64", 8, {}},
    {HCCL_DATA_TYPE_BFP16, "bfp16", 2, DType::bfloat16},
    {HCCL_DATA_TYPE_INT128, "int128", 16, {}},
    {HCCL_DATA_TYPE_HIF8, "hif8", 1, {}},
    {HCCL_DATA_TYPE_FP8E4M3, "fp8e4m3", 1, {}},
    {HCCL_DATA_TYPE_FP8E5M2, "fp8e5m2", 1, {}},
    {HCCL_DATA_TYPE_FP8E8M0, "fp8e8m0", 1, {}},
};

const Type& info(HcclDataType type) {
    for (const Type& entry : types)
        if (entry.type == type) return entry;
    throw Failure(HCCL_E_PARA, "dataType is ", type, ", which is not a type of HCCL");
}

}  // namespace

size_t size_of(HcclDataType type) {
    return info(type).size;
}

std::string name_of(HcclDataType type) {
    return info(type).name;
}

DType wire_type(HcclDataType type) {
    switch (size_of(type)) {
        case 1:
            return DType::uint8;
        case 2:
            return DType::uint16;
        case 4:
            return DType::uint32;
        case 8:
            return DType::uint64;
        default:
            return DType::complex128;
    }
}

DType reduce_type(HcclDataType type) {
    const Type& entry = info(type);
    if (entry.reduces) return *entry.reduces;
    throw Failure(HCCL_E_NOT_SUPPORT, "HCCL does not reduce dataType ", entry.name);
}

ReduceOp reduce_op(HcclReduceOp op, HcclDataType type) {
    if (op == HCCL_REDUCE_PROD && (type == HCCL_DATA_TYPE_INT16 || type == HCCL_DATA_TYPE_BFP16))
        throw Failure(HCCL_E_NOT_SUPPORT, "HCCL makes no products (op prod) of dataType ", name_of(type));
    switch (op) {
        case HCCL_REDUCE_SUM:
            return ReduceOp::sum;
        case HCCL_REDUCE_PROD:
            return ReduceOp::prod;
        case HCCL_REDUCE_MAX:
            return ReduceOp::max;
        case HCCL_REDUCE_MIN:
            return ReduceOp::min;
        default:
            throw Failure(HCCL_E_PARA, "op is ", op, ", expected 0 to 3");
    }
}

}  // namespace alltoallv::emulator
