/// \file dtype.h
/// \brief Element types that the operators move, with their size and name.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace alltoallv {

/// Names follow NumPy and ml_dtypes. Data movement needs only the size; reductions need the meaning.
enum class DType : uint8_t {
    bool_,
    int8,
    uint8,
    int16,
    uint16,
    int32,
    uint32,
    int64,
    uint64,
    float16,
    bfloat16,
    float32,
    float64,
    complex64,
    complex128,
    float8_e4m3fn,
    float8_e4m3fnuz,
    float8_e4m3b11fnuz,
    float8_e4m3,
    float8_e3m4,
    float8_e5m2,
    float8_e5m2fnuz,
    float8_e8m0fnu,
};

struct DTypeInfo {
    std::string_view name;
    size_t size;  // bytes
};

inline constexpr std::array<DTypeInfo, 23> dtype_table{{
    {"bool", 1},
    {"int8", 1},
    {"uint8", 1},
    {"int16", 2},
    {"uint16", 2},
    {"int32", 4},
    {"uint32", 4},
    {"int64", 8},
    {"uint64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
    {"complex64", 8},
    {"complex128", 16},
    {"float8_e4m3fn", 1},
    {"float8_e4m3fnuz", 1},
    {"float8_e4m3b11fnuz", 1},
    {"float8_e4m3", 1},
    {"float8_e3m4", 1},
    {"float8_e5m2", 1},
    {"float8_e5m2fnuz", 1},
    {"float8_e8m0fnu", 1},
}};

constexpr const DTypeInfo& info(DType dtype) {
    return dtype_table[static_cast<size_t>(dtype)];
}
constexpr size_t size_of(DType dtype) {
    return info(dtype).size;
}
constexpr std::string_view name_of(DType dtype) {
    return info(dtype).name;
}

}  // namespace alltoallv
