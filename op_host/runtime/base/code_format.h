// The table of formats in which quantized collectives send elements.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
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
    rotated = 2,    ///< a group is multiplied by a Hadamard matrix where that makes its scale smaller
    spikes = 4,     ///< the largest magnitudes of a group are kept apart
};

/// Groups that are rotated or have spikes have at most so many elements; so many spikes each, of so many bytes in all.
inline constexpr size_t longest_shaped = 1024, spikes_each = 2, spike_bytes = 8;

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
    X(mxfp4_up, 4, 1, 1, 6, e8m0, 32, rounds_up) \
    X(int6, 6, -1, 0, 31, float32, 0, 0) \
    X(int5, 5, -1, 0, 15, float32, 0, 0) \
    X(int3, 3, -1, 0, 3, float32, 0, 0) \
    X(int2, 2, -1, 0, 1, float32, 0, 0) \
    X(int4_rotated, 4, -1, 0, 7, float32, 0, rotated) \
    X(int4_spikes, 4, -1, 0, 7, float32, 0, spikes) \
    X(int8_rotated_spikes, 8, -1, 0, 127, float32, 0, rotated | spikes) \
    X(int6_rotated_spikes, 6, -1, 0, 31, float32, 0, rotated | spikes) \
    X(int5_rotated_spikes, 5, -1, 0, 15, float32, 0, rotated | spikes) \
    X(int4_rotated_spikes, 4, -1, 0, 7, float32, 0, rotated | spikes) \
    X(int3_rotated_spikes, 3, -1, 0, 3, float32, 0, rotated | spikes) \
    X(int2_rotated_spikes, 2, -1, 0, 1, float32, 0, rotated | spikes) \
    X(mxfp6_e3m2, 6, 2, 3, 28, e8m0, 32, rounds_up) \
    X(mxfp6_e2m3, 6, 3, 1, 7.5f, e8m0, 32, rounds_up)
// clang-format on

enum class CodeFormat : uint8_t {
#define X(id, ...) id,
    ALLTOALLV_CODE_FORMATS(X)
#undef X
};

/// Returns the bytes of `count` codes of so many bits, in planes, whose widths are the binary digits of `bits`.
constexpr size_t packed_bytes(int bits, size_t count) {
    size_t bytes = 0;
    for (const int width : {8, 4, 2, 1})
        if ((bits & width) != 0) bytes += (count * static_cast<size_t>(width) + 7) / 8;
    return bytes;
}

struct CodeFormatInfo {
    std::string_view name;
    int bits, mantissa, bias;
    float most;
    ScaleKind scale;
    size_t group_size;
    unsigned traits;

    constexpr bool has(Trait trait) const { return (traits & trait) != 0; }
    constexpr bool shaped() const { return has(rotated) || has(spikes); }
    /// Elements that a group has at most; 0: any number.
    constexpr size_t longest_group() const { return shaped() ? longest_shaped : group_size; }
    /// True if a record of scales consists of float32 numbers.
    constexpr bool has_floats() const { return scale == ScaleKind::float32 && !has(spikes); }
    /// Returns the bytes of the record of scales of so many groups.
    constexpr size_t scale_bytes(size_t groups) const {
        if (scale == ScaleKind::float32) return groups * (sizeof(float) + (has(spikes) ? spike_bytes : 0));
        return groups + (scale == ScaleKind::e4m3 ? sizeof(float) : 0);
    }
    /// Returns the bytes of the codes of `count` elements; every plane of every group begins at a byte.
    constexpr size_t code_bytes(size_t count, size_t group) const {
        return count / group * packed_bytes(bits, group) + packed_bytes(bits, count % group);
    }
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
    const CodeFormatInfo& row = info(format);
    if (row.group_size != 0) return group_size == static_cast<int64_t>(row.group_size);
    return group_size >= 1 && (!row.shaped() || group_size <= static_cast<int64_t>(row.longest_group()));
}

/// Returns what takes_group() expects, for messages.
inline std::string groups_taken(CodeFormat format) {
    const CodeFormatInfo& row = info(format);
    const std::string within = " in format " + std::string(row.name);
    if (row.group_size != 0) return std::to_string(row.group_size) + within;
    return row.shaped() ? "1 to " + std::to_string(row.longest_group()) + within : "at least 1";
}

}  // namespace alltoallv
