// The types by which HCCL moves our element types: its own if it has them, else integers of the same size.
#pragma once

#include <optional>

#include "runtime/abi/hccl.h"
#include "runtime/base/dtype.h"
#include "runtime/core/collective.h"

namespace alltoallv {

/// HcclAlltoAllV reads counts and displacements as uint64, and moves up to this many elements to one rank.
inline constexpr int64_t hccl_max_count = 0x7FFFFFFFF;

struct WireType {
    HcclDataType type;
    int64_t per_element;  ///< units of `type` in one element
};

/// Returns the bytes of an element of a type that moves one of ours without conversion.
constexpr uint64_t bytes_of(HcclDataType type) {
    for (const DTypeInfo& dtype : dtype_table)
        if (dtype.hccl == type && dtype.hccl_units == 1) return dtype.size;
    return 0;
}

/// Returns the type for moving any dtype: float8 types, complex numbers and bool travel as integers.
constexpr WireType wire_type(DType dtype) {
    return {static_cast<HcclDataType>(info(dtype).hccl), info(dtype).hccl_units};
}
static_assert([] {
    for (size_t i = 0; i < dtype_table.size(); ++i) {
        const WireType wire = wire_type(static_cast<DType>(i));
        if (bytes_of(wire.type) * static_cast<uint64_t>(wire.per_element) != dtype_table[i].size) return false;
    }
    return true;
}());
static_assert(wire_type(DType::bfloat16).type == HCCL_DATA_TYPE_BFP16);

/// Returns the type for reductions if HCCL computes with it on every device family, else nothing.
constexpr std::optional<HcclDataType> reduction_type(DType dtype) {
    return info(dtype).hccl_reduces ? std::optional(wire_type(dtype).type) : std::nullopt;
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
