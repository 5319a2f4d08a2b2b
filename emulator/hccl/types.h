// Converts HCCL's element types and reductions to the core's.
#pragma once

#include <cstddef>
#include <string>

#include "hccl/hccl_api.h"
#include "runtime/core/collective.h"

namespace alltoallv::emulator {

/// Returns the bytes of an element; throws Failure(HCCL_E_PARA) for a number that is not a type.
size_t size_of(HcclDataType type);

std::string name_of(HcclDataType type);

/// Returns a type of the same size, for moving elements.
DType wire_type(HcclDataType type);

/// Returns the type for reducing; throws Failure(HCCL_E_NOT_SUPPORT) for types that HCCL does not reduce.
DType reduce_type(HcclDataType type);

/// Throws Failure(HCCL_E_PARA) for a number that is not a reduction, and Failure(HCCL_E_NOT_SUPPORT) for a product of a
/// type that HCCL does not multiply.
ReduceOp reduce_op(HcclReduceOp op, HcclDataType type);

}  // namespace alltoallv::emulator
