#include "all_to_all_v/tensor_checks.h"

#include <string>

#include "runtime/base/error.h"

namespace alltoallv {
namespace {

constexpr size_t max_dims = 8;
constexpr uint64_t max_tensor_bytes = uint64_t{256} << 30;

}  // namespace

void check_tensor_count(std::string_view what, size_t count, size_t expected) {
    if (count == expected) return;
    throw invalid_tensor(2002, ErrorType::INVALID_IN_TENSOR_NUM, "the number of ", what, " is ", count, ", expected ",
                         expected);
}

int64_t check_shape(std::string_view name, const TensorDesc& desc) {
    if (desc.shape.empty() || desc.shape.size() > max_dims)
        throw invalid_tensor(2003, ErrorType::INVALID_TENSOR_DIM, "the ", name, " has ", desc.shape.size(),
                             " dimensions, expected 1 to 8");
    uint64_t bytes = size_of(desc.dtype);
    bool is_in_range = true;
    for (const int64_t dim : desc.shape) {
        // Divides instead of multiplying, because the product may not fit 64 bits.
        is_in_range = is_in_range && dim > 0 && static_cast<uint64_t>(dim) <= max_tensor_bytes / bytes;
        if (is_in_range) bytes *= static_cast<uint64_t>(dim);
    }
    if (!is_in_range)
        throw invalid_tensor(2004, ErrorType::INVALID_TENSOR_SIZE, "the ", name, " has shape ", list_text(desc.shape),
                             " of ", name_of(desc.dtype), ", expected positive dimensions and at most 256 GiB");
    return static_cast<int64_t>(bytes / size_of(desc.dtype));
}

void check_nd(std::string_view name, const TensorDesc& desc) {
    if (desc.format == Format::nd) return;
    throw invalid_tensor(2005, ErrorType::INVALID_TENSOR_INI_MATCH, "the format of the ", name,
                         " is not nd, the only one supported");
}

void refuse_dtype(std::string_view name, const TensorDesc& desc, std::string_view expected) {
    throw invalid_tensor(2006, ErrorType::INVALID_TENSOR_INI_MATCH, "the dtype of the ", name, " is ",
                         name_of(desc.dtype), ", expected ", expected);
}

void check_same_shape(const TensorDesc& output, const TensorDesc& expected) {
    if (output.shape == expected.shape) return;
    throw invalid_tensor(2007, ErrorType::INVALID_TENSOR_DIM, "the output has shape ", list_text(output.shape),
                         ", expected ", list_text(expected.shape));
}

void check_buffer(std::string_view name, const ByteRange& buffer, const TensorDesc& desc) {
    const size_t bytes = static_cast<size_t>(element_count(desc.shape)) * size_of(desc.dtype);
    if (bytes == 0 && buffer.bytes == 0) return;
    if (buffer.address == 0) throw invalid_param(1019, "the ", name, " has a null address");
    if (buffer.bytes != bytes)
        throw invalid_param(1020, "the ", name, " has ", buffer.bytes, " bytes, expected the ", bytes, " of setup");
}

}  // namespace alltoallv
