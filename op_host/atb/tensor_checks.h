// What every ATB-shaped operation checks of its tensors, with ATB's codes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/tensor_view.h"

namespace alltoallv {

/// Memory of one tensor at execution.
struct Buffer {
    void* data = nullptr;
    uint64_t bytes = 0;
};

/// Code 5.
void check_tensor_count(std::string_view what, size_t count, size_t expected);

/// Dimensions (code 8) and bytes (code 9); returns the elements.
int64_t check_shape(std::string_view name, const TensorDesc& desc);

/// Code 13 for a format other than nd.
void check_nd(std::string_view name, const TensorDesc& desc);

bool overlaps(const Buffer& a, const Buffer& b);

/// Code 1 for a null address or another size than that of setup.
void check_buffer(std::string_view name, const Buffer& buffer, uint64_t bytes);

}  // namespace alltoallv
