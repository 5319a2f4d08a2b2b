// The table of reduction operators, and for which element types each is defined.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/base/dtype.h"

namespace alltoallv {

// clang-format off
/// Columns: name; true if it is defined for truth values, integers, floating-point numbers, complex numbers.
#define ALLTOALLV_REDUCE_OPS(X) \
    X(sum, true, true, true, true) \
    X(avg, false, false, true, true) \
    X(min, true, true, true, false) \
    X(max, true, true, true, false) \
    X(prod, true, true, true, false) \
    X(band, true, true, false, false) \
    X(bor, true, true, false, false) \
    X(bxor, true, true, false, false)
// clang-format on

enum class ReduceOp : uint8_t {
#define X(name, ...) name,
    ALLTOALLV_REDUCE_OPS(X)
#undef X
};

inline constexpr std::string_view reduce_op_names[] = {
#define X(name, ...) #name,
    ALLTOALLV_REDUCE_OPS(X)
#undef X
};

constexpr std::string_view name_of(ReduceOp op) {
    const auto row = static_cast<size_t>(op);
    return row < std::size(reduce_op_names) ? reduce_op_names[row] : "unknown";
}

constexpr bool is_defined(ReduceOp op, Arithmetic arithmetic) {
    constexpr bool table[][4] = {
#define X(name, ...) {__VA_ARGS__},
        ALLTOALLV_REDUCE_OPS(X)
#undef X
    };
    if (static_cast<size_t>(op) >= std::size(reduce_op_names) || arithmetic == Arithmetic::none) return false;
    return table[static_cast<size_t>(op)][static_cast<size_t>(arithmetic) - 1];
}

constexpr std::optional<ReduceOp> reduce_op(std::string_view name) {
    for (size_t i = 0; i < std::size(reduce_op_names); ++i)
        if (reduce_op_names[i] == name) return static_cast<ReduceOp>(i);
    return std::nullopt;
}

/// Returns the names of all operators, or the types that one is defined for, as a message lists them: "a, b or c".
std::string reduce_ops_listed();
std::string dtypes_listed(ReduceOp op);

}  // namespace alltoallv
