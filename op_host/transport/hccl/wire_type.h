/// \file wire_type.h
/// \brief How HCCL sees our element types: its own where it has them, integers of the same bytes where it has not.
#pragma once

#include <optional>

#include "base/dtype.h"
#include "comm/collective.h"
#include "transport/hccl/abi.h"

namespace alltoallv {

struct WireType {
    abi::DataType type;
    int64_t per_element;  ///< units of `type` in one element
};

/// For moving data, any dtype.
constexpr WireType wire_type(DType dtype) {
    switch (dtype) {
        case DType::int8:
            return {abi::DataType::int8, 1};
        case DType::int16:
            return {abi::DataType::int16, 1};
        case DType::uint16:
            return {abi::DataType::uint16, 1};
        case DType::int32:
            return {abi::DataType::int32, 1};
        case DType::uint32:
            return {abi::DataType::uint32, 1};
        case DType::int64:
            return {abi::DataType::int64, 1};
        case DType::uint64:
        case DType::complex64:
            return {abi::DataType::uint64, 1};
        case DType::complex128:
            return {abi::DataType::uint64, 2};
        case DType::float16:
            return {abi::DataType::fp16, 1};
        case DType::bfloat16:
            return {abi::DataType::bfp16, 1};
        case DType::float32:
            return {abi::DataType::fp32, 1};
        case DType::float64:
            return {abi::DataType::fp64, 1};
        default:
            return {abi::DataType::uint8, 1};  // bool and the float8 family
    }
}

/// For reductions: what HCCL computes with on every device family, else nothing.
constexpr std::optional<abi::DataType> reduction_type(DType dtype) {
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

constexpr std::optional<abi::Reduce> reduction_of(ReduceOp op) {
    switch (op) {
        case ReduceOp::sum:
            return abi::Reduce::sum;
        case ReduceOp::prod:
            return abi::Reduce::prod;
        case ReduceOp::max:
            return abi::Reduce::max;
        case ReduceOp::min:
            return abi::Reduce::min;
        default:
            return std::nullopt;
    }
}

}  // namespace alltoallv
