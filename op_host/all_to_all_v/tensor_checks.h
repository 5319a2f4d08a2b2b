// Checks that all ATB-shaped operations make of their tensors, with ATB's codes.
#pragma once

#include <cstdint>
#include <string_view>

#include "runtime/base/tensor_desc.h"
#include "runtime/core/request.h"

namespace alltoallv {

/// The names of an operation's input tensors, in their order.
inline constexpr std::string_view input_names[] = {"input", "scale", "offset"};
inline constexpr std::string_view output_names[] = {"output", "error feedback", "error feedback of the gather"};

/// Throws code 5.
void check_tensor_count(std::string_view what, size_t count, size_t expected);

/// Checks dimensions (code 8) and bytes (code 9); returns the number of elements.
int64_t check_shape(std::string_view name, const TensorDesc& desc);

/// Throws code 13 for a format other than nd.
void check_nd(std::string_view name, const TensorDesc& desc);

/// Throws code 13, with the expected dtypes.
[[noreturn]] void refuse_dtype(std::string_view name, const TensorDesc& desc, std::string_view expected);

/// Throws code 8 if the output does not have the shape of `expected`.
void check_same_shape(const TensorDesc& output, const TensorDesc& expected);

/// Throws code 1 for a null address or a size other than in setup; an empty buffer may have a null address.
void check_buffer(std::string_view name, const ByteRange& buffer, const TensorDesc& desc);

}  // namespace alltoallv
