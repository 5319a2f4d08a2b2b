/// \file wire_type.h
/// \brief How HCCL sees our element types: its own where it has them, integers of the same bytes where it has not.
#pragma once

#include <optional>

#include "abi/hccl.h"
#include "base/dtype.h"
#include "core/collective.h"

namespace alltoallv {

/// HcclAlltoAllV reads counts and displacements as uint64, and moves up to this many elements to one rank.
inline constexpr int64_t hccl_max_count = 0x7FFFFFFFF;

struct WireType {
    HcclDataType type;
    int64_t per_element;  ///< units of `type` in one element
};

/// Bytes of an element of the types below.
constexpr uint64_t bytes_of(HcclDataType type) {
    switch (type) {
        case HCCL_DATA_TYPE_INT8:
        case HCCL_DATA_TYPE_UINT8:
            return 1;
        case HCCL_DATA_TYPE_INT16:
        case HCCL_DATA_TYPE_UINT16:
        case HCCL_DATA_TYPE_FP16:
        case HCCL_DATA_TYPE_BFP16:
            return 2;
        case HCCL_DATA_TYPE_INT32:
        case HCCL_DATA_TYPE_UINT32:
        case HCCL_DATA_TYPE_FP32:
            return 4;
        default:
            return 8;
    }
}

/// For moving data, any dtype.
constexpr WireType wire_type(DType dtype) {
    switch (dtype) {
        case DType::int8:
            return {HCCL_DATA_TYPE_INT8, 1};
        case DType::int16:
            return {HCCL_DATA_TYPE_INT16, 1};
        case DType::uint16:
            return {HCCL_DATA_TYPE_UINT16, 1};
        case DType::int32:
            return {HCCL_DATA_TYPE_INT32, 1};
        case DType::uint32:
            return {HCCL_DATA_TYPE_UINT32, 1};
        case DType::int64:
            return {HCCL_DATA_TYPE_INT64, 1};
        case DType::uint64:
        case DType::complex64:
            return {HCCL_DATA_TYPE_UINT64, 1};
        case DType::complex128:
            return {HCCL_DATA_TYPE_UINT64, 2};
        case DType::float16:
            return {HCCL_DATA_TYPE_FP16, 1};
        case DType::bfloat16:
            return {HCCL_DATA_TYPE_BFP16, 1};
        case DType::float32:
            return {HCCL_DATA_TYPE_FP32, 1};
        case DType::float64:
            return {HCCL_DATA_TYPE_FP64, 1};
        default:
            return {HCCL_DATA_TYPE_UINT8, 1};  // bool and the float8 family
    }
}

/// For reductions: what HCCL computes with on every device family, else nothing.
constexpr std::optional<HcclDataType> reduction_type(DType dtype) {
    switch (dtype) {
        case DType::int8:
        case DType::int16:
        case DType::int32:
        case DType::int64:
        case DType::float16:
        case DType::bfloat16:
        case DType::float32:
            return wire_type(dtype).type;
        default:
            return std::nullopt;
    }
}

constexpr std::optional<HcclReduceOp> reduction_of(ReduceOp op) {
    switch (op) {
        case ReduceOp::sum:
            return HCCL_REDUCE_SUM;
        case ReduceOp::prod:
            return HCCL_REDUCE_PROD;
        case ReduceOp::max:
            return HCCL_REDUCE_MAX;
        case ReduceOp::min:
            return HCCL_REDUCE_MIN;
        default:
            return std::nullopt;
    }
}

}  // namespace alltoallv
