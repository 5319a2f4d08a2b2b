/// \file shape_words.h
/// \brief The shape of a reduced tensor, which ranks compare, in the few bytes that a row has for it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

namespace alltoallv {

/// Holds a digest of all dimensions, and as many of them as fit. Without a shape the digest is 0: the caller has none,
/// as for tensors in a list, and peers do not compare it.
struct ShapeWords {
    uint32_t digest = 0;
    std::array<int64_t, 2> words{};

    ShapeWords() = default;
    explicit ShapeWords(std::span<const int64_t> shape);
};

/// Returns the shape as Python writes tuples, and "..." for dimensions that did not fit. Any words are valid.
std::string shape_text(const std::array<int64_t, 2>& words);

}  // namespace alltoallv
