#include "atb/tensor_checks.h"

#include "base/error.h"
#include "core/request.h"

namespace alltoallv {
namespace {

constexpr size_t max_dims = 8;
constexpr uint64_t max_tensor_bytes = uint64_t{256} << 30;

}  // namespace

void check_tensor_count(std::string_view what, size_t count, size_t expected) {
    if (count == expected) return;
    throw invalid_tensor(ErrorType::INVALID_IN_TENSOR_NUM, "the number of " + std::string(what) + " is " +
                                                               std::to_string(count) + ", expected " +
                                                               std::to_string(expected));
}

int64_t check_shape(std::string_view name, const TensorDesc& desc) {
    if (desc.shape.empty() || desc.shape.size() > max_dims) {
        throw invalid_tensor(
            ErrorType::INVALID_TENSOR_DIM,
            "the " + std::string(name) + " has " + std::to_string(desc.shape.size()) + " dimensions, expected 1 to 8");
    }
    uint64_t bytes = size_of(desc.dtype);
    bool is_in_range = true;
    for (const int64_t dim : desc.shape) {
        // Dividing instead of multiplying: the product may not fit 64 bits.
        is_in_range = is_in_range && dim > 0 && static_cast<uint64_t>(dim) <= max_tensor_bytes / bytes;
        if (is_in_range) bytes *= static_cast<uint64_t>(dim);
    }
    if (!is_in_range) {
        throw invalid_tensor(ErrorType::INVALID_TENSOR_SIZE, "the " + std::string(name) + " has shape " +
                                                                 list_text(desc.shape) + " of " +
                                                                 std::string(name_of(desc.dtype)) +
                                                                 ", expected positive dimensions and at most 256 GiB");
    }
    return static_cast<int64_t>(bytes / size_of(desc.dtype));
}

void check_nd(std::string_view name, const TensorDesc& desc) {
    if (desc.format == Format::nd) return;
    throw invalid_tensor(ErrorType::INVALID_TENSOR_INI_MATCH,
                         "the format of the " + std::string(name) + " is not nd, the only one supported");
}

bool overlaps(const Buffer& a, const Buffer& b) {
    const auto start_a = reinterpret_cast<uintptr_t>(a.data), start_b = reinterpret_cast<uintptr_t>(b.data);
    return start_a < start_b ? start_b - start_a < a.bytes : start_a - start_b < b.bytes;
}

void check_buffer(std::string_view name, const Buffer& buffer, uint64_t bytes) {
    if (buffer.data == nullptr) throw invalid_param("the " + std::string(name) + " has a null address");
    if (buffer.bytes != bytes) {
        throw invalid_param("the " + std::string(name) + " has " + std::to_string(buffer.bytes) +
                            " bytes, expected the " + std::to_string(bytes) + " of setup");
    }
}

}  // namespace alltoallv
