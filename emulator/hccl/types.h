// HCCL's element types and reductions in the core's terms.
#pragma once

#include <cstddef>
#include <string>

#include "core/collective.h"
#include "hccl/hccl_api.h"

namespace alltoallv::emulator {

/// Bytes of an element; throws Failure(HCCL_E_PARA) for a number that is no type.
size_t size_of(HcclDataType type);

std::string name_of(HcclDataType type);

/// For moving elements: a type of the same size.
DType wire_type(HcclDataType type);

/// For reducing: throws Failure(HCCL_E_NOT_SUPPORT) for types that HCCL does not reduce.
DType reduce_type(HcclDataType type);

/// Throws Failure(HCCL_E_PARA) for a number that is no reduction.
ReduceOp reduce_op(HcclReduceOp op);

}  // namespace alltoallv::emulator
