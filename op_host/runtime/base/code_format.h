// The table of formats in which quantized collectives send elements.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace alltoallv {

/// How a group's scale is computed, and how a record stores the scales of its groups.
enum class ScaleKind : uint8_t {
    float32,  ///< largest magnitude / largest code; 4 bytes each
    e8m0,     ///< a power of two, as in OCP's MX formats; 1 byte each
    e4m3,     ///< a float8 times one float32 scale of the tensor, as in NVFP4; 4 bytes, then 1 byte each
};

inline constexpr std::string_view scale_names[] = {"float32", "e8m0", "e4m3"};

/// Handling of a finite value that the output type cannot hold: it becomes the type's largest finite value; the same,
/// and an error is raised; or it becomes inf.
enum class Overflow : uint8_t { saturate, raise, infinity };
inline constexpr std::string_view overflow_names[] = {"saturate", "raise", "infinity"};

/// What a format does besides, as bits.
enum Trait : uint8_t {
    rounds_up = 1,  ///< a power of two is the one at or above the quotient, not the one below it
};

// clang-format off
/// Columns: the enumerator, which is the name; bits of a code; bits of its mantissa (-1: an integer); bias of its
/// exponent; largest value; scales; elements per group (0: any number); traits.
#define ALLTOALLV_CODE_FORMATS(X) \
    X(int8, 8, -1, 0, 127, float32, 0, 0) \
    X(int4, 4, -1, 0, 7, float32, 0, 0) \
    X(fp8_e4m3, 8, 3, 7, 448, float32, 0, 0) \
    X(fp8_e5m2, 8, 2, 15, 57344, float32, 0, 0) \
    X(mxfp8, 8, 3, 7, 448, e8m0, 32, rounds_up) \
    X(mxfp8_e5m2, 8, 2, 15, 57344, e8m0, 32, rounds_up) \
    X(mxfp4, 4, 1, 1, 6, e8m0, 32, 0) \
    X(nvfp4, 4, 1, 1, 6, e4m3, 16, 0) \
    X(mxfp8_down, 8, 3, 7, 448, e8m0, 32, 0) \
    X(mxfp8_e5m2_down, 8, 2, 15, 57344, e8m0, 32, 0) \
    X(mxfp4_up, 4, 1, 1, 6, e8m0, 32, rounds_up)
// clang-format on

enum class CodeFormat : uint8_t {
#define X(id, ...) id,
    ALLTOALLV_CODE_FORMATS(X)
#undef X
};

struct CodeFormatInfo {
    std::string_view name;
    int bits, mantissa, bias;
    float most;
    ScaleKind scale;
    size_t group_size;
    unsigned traits;

    constexpr bool has(Trait trait) const { return (traits & trait) != 0; }
    /// True if what an element can be wrong by follows from its own code and its group's scale.
    constexpr bool tells_bounds() const { return (traits & ~unsigned{rounds_up}) == 0; }
};

inline constexpr std::array code_format_table{
#define X(id, bits, mantissa, bias, most, scale, group, traits) \
    CodeFormatInfo{#id, bits, mantissa, bias, most, ScaleKind::scale, group, traits},
    ALLTOALLV_CODE_FORMATS(X)
#undef X
};

constexpr const CodeFormatInfo& info(CodeFormat format) {
    return code_format_table[static_cast<size_t>(format)];
}

constexpr std::optional<CodeFormat> code_format(std::string_view name) {
    for (size_t i = 0; i < code_format_table.size(); ++i)
        if (code_format_table[i].name == name) return static_cast<CodeFormat>(i);
    return std::nullopt;
}

constexpr int64_t usual_group(CodeFormat format) {
    const size_t fixed = info(format).group_size;
    return fixed == 0 ? 128 : static_cast<int64_t>(fixed);
}

/// True if a format can have groups of this size.
constexpr bool takes_group(CodeFormat format, int64_t group_size) {
    const auto fixed = static_cast<int64_t>(info(format).group_size);
    return group_size >= 1 && (fixed == 0 || group_size == fixed);
}

}  // namespace alltoallv
