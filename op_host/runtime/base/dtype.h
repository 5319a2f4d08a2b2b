// The table of element types, and of what can be done with each of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace alltoallv {

/// The kind of arithmetic that reductions use for a type.
enum class Arithmetic : uint8_t { none, logical, integer, floating, complex };

inline constexpr std::string_view arithmetic_names[] = {"none", "logical", "integer", "floating", "complex"};

// clang-format off
/// Columns: enumerator; name, NumPy's or ml_dtypes'; bytes; arithmetic; DLPack's code; true if quantized collectives
/// accept it; HCCL's number of the type that moves it, and how many of those make an element; true if HCCL reduces it
/// on every device family; true if ATB's AllToAllV accepts it.
#define ALLTOALLV_DTYPES(X) \
    X(bool_, "bool", 1, logical, 6, false, 7, 1, false, false) \
    X(int8, "int8", 1, integer, 0, false, 0, 1, true, true) \
    X(uint8, "uint8", 1, integer, 1, false, 7, 1, false, false) \
    X(int16, "int16", 2, integer, 0, false, 1, 1, true, true) \
    X(uint16, "uint16", 2, integer, 1, false, 8, 1, false, false) \
    X(int32, "int32", 4, integer, 0, false, 2, 1, true, true) \
    X(uint32, "uint32", 4, integer, 1, false, 9, 1, false, false) \
    X(int64, "int64", 8, integer, 0, false, 5, 1, true, true) \
    X(uint64, "uint64", 8, integer, 1, false, 6, 1, false, false) \
    X(float16, "float16", 2, floating, 2, true, 3, 1, true, true) \
    X(bfloat16, "bfloat16", 2, floating, 4, true, 11, 1, true, true) \
    X(float32, "float32", 4, floating, 2, true, 4, 1, true, true) \
    X(float64, "float64", 8, floating, 2, false, 10, 1, false, false) \
    X(complex64, "complex64", 8, complex, 5, false, 6, 1, false, false) \
    X(complex128, "complex128", 16, complex, 5, false, 6, 2, false, false) \
    X(float8_e4m3fn, "float8_e4m3fn", 1, none, 10, false, 7, 1, false, false) \
    X(float8_e4m3fnuz, "float8_e4m3fnuz", 1, none, 11, false, 7, 1, false, false) \
    X(float8_e4m3b11fnuz, "float8_e4m3b11fnuz", 1, none, 9, false, 7, 1, false, false) \
    X(float8_e4m3, "float8_e4m3", 1, none, 8, false, 7, 1, false, false) \
    X(float8_e3m4, "float8_e3m4", 1, none, 7, false, 7, 1, false, false) \
    X(float8_e5m2, "float8_e5m2", 1, none, 12, false, 7, 1, false, false) \
    X(float8_e5m2fnuz, "float8_e5m2fnuz", 1, none, 13, false, 7, 1, false, false) \
    X(float8_e8m0fnu, "float8_e8m0fnu", 1, none, 14, false, 7, 1, false, false)
// clang-format on

/// A type of the table, or one that can only be moved: bytes of an element << 16 | a digest of its identity, by which
/// ranks notice a difference. Such a type needs no row, because its name contains both numbers.
enum class DType : uint32_t {
#define X(id, ...) id,
    ALLTOALLV_DTYPES(X)
#undef X
};

struct DTypeInfo {
    std::string_view name;
    size_t size;  // bytes
    Arithmetic arithmetic;
    uint8_t dlpack;
    bool quantizes;
    int hccl, hccl_units;
    bool hccl_reduces, atb;
};

inline constexpr std::array dtype_table{
#define X(id, name, size, arithmetic, ...) DTypeInfo{name, size, Arithmetic::arithmetic, __VA_ARGS__},
    ALLTOALLV_DTYPES(X)
#undef X
};

constexpr bool only_moves(DType dtype) {
    return static_cast<uint32_t>(dtype) >> 16 != 0;
}

/// Returns the row of a type that can only be moved, named "N bytes #digest"; it lives as long as the process.
const DTypeInfo& moving_info(DType dtype);

/// Returns the type of such a name; nothing for other names.
std::optional<DType> moving_dtype(std::string_view name);

/// Returns the type of the table with that name.
constexpr std::optional<DType> table_dtype(std::string_view name) {
    for (size_t i = 0; i < dtype_table.size(); ++i)
        if (dtype_table[i].name == name) return static_cast<DType>(i);
    return std::nullopt;
}

constexpr const DTypeInfo& info(DType dtype) {
    return only_moves(dtype) ? moving_info(dtype) : dtype_table[static_cast<size_t>(dtype)];
}
constexpr size_t size_of(DType dtype) {
    return only_moves(dtype) ? static_cast<uint32_t>(dtype) >> 16 : info(dtype).size;
}
constexpr std::string_view name_of(DType dtype) {
    return info(dtype).name;
}

}  // namespace alltoallv
