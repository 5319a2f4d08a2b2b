// The operators of a reduction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

namespace alltoallv {

enum class ReduceOp : uint8_t { sum, avg, min, max, prod, band, bor, bxor };

inline constexpr std::string_view reduce_op_names[] = {"sum", "avg", "min", "max", "prod", "band", "bor", "bxor"};

constexpr std::string_view name_of(ReduceOp op) {
    const auto row = static_cast<size_t>(op);
    return row < std::size(reduce_op_names) ? reduce_op_names[row] : "unknown";
}

}  // namespace alltoallv
