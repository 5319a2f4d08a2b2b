#include "runtime/core/shape_words.h"

#include <cstring>
#include <vector>

#include "runtime/core/request.h"

namespace alltoallv {
namespace {

constexpr uint8_t group_bits = 7, more = 1 << group_bits;  // of a dimension, the least significant group first

}  // namespace

/// The first byte is the number of dimensions, the others are groups of bits.
ShapeWords::ShapeWords(std::span<const int64_t> shape) {
    uint64_t hash = shape.size() + 1;
    std::array<uint8_t, sizeof words> bytes{static_cast<uint8_t>(shape.size())};
    size_t at = 1;
    for (const int64_t length : shape) {
        auto rest = static_cast<uint64_t>(length);
        hash = (hash ^ rest) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
        for (bool goes_on = true; goes_on && at < bytes.size(); ++at, rest >>= group_bits) {
            goes_on = rest >= more;
            bytes[at] = static_cast<uint8_t>((rest & (more - 1)) | (goes_on ? more : 0));
        }
    }
    digest = static_cast<uint32_t>(hash) | 1;
    std::memcpy(words.data(), bytes.data(), sizeof words);
}

std::string shape_text(const std::array<int64_t, 2>& words) {
    std::array<uint8_t, sizeof words> bytes;
    std::memcpy(bytes.data(), words.data(), sizeof words);
    std::vector<int64_t> shape;
    uint64_t length = 0;
    for (size_t at = 1, shift = 0; at < bytes.size() && shape.size() < bytes[0]; ++at) {
        length |= static_cast<uint64_t>(bytes[at] & (more - 1)) << shift;
        shift += group_bits;
        if (bytes[at] & more && shift < 64) continue;
        shape.push_back(static_cast<int64_t>(length));
        length = shift = 0;
    }
    std::string text = tuple_text(shape);
    if (shape.size() < bytes[0]) text.replace(text.size() - 1, 1, shape.size() == 1 ? " ...)" : ", ...)");
    return text;
}

}  // namespace alltoallv
