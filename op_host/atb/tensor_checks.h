// What every ATB-shaped operation checks of its tensors, with ATB's codes.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/tensor_desc.h"
#include "core/request.h"

namespace alltoallv {

/// Of an operation's tensors, in their order.
inline constexpr std::string_view input_names[] = {"input", "scale", "offset"};
inline constexpr std::string_view output_names[] = {"output", "error feedback", "error feedback of the gather"};

/// Code 5.
void check_tensor_count(std::string_view what, size_t count, size_t expected);

/// Dimensions (code 8) and bytes (code 9); returns the elements.
int64_t check_shape(std::string_view name, const TensorDesc& desc);

/// Code 13 for a format other than nd.
void check_nd(std::string_view name, const TensorDesc& desc);

/// Code 13, with the dtypes that are expected.
[[noreturn]] void refuse_dtype(std::string_view name, const TensorDesc& desc, std::string_view expected);

/// Code 8 for an output that has not the shape of `expected`.
void check_same_shape(const TensorDesc& output, const TensorDesc& expected);

/// Code 1 for a null address or another size than that of setup; what is empty may lie at 0.
void check_buffer(std::string_view name, const ByteRange& buffer, const TensorDesc& desc);

}  // namespace alltoallv
