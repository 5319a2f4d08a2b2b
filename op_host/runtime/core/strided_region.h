/// \file strided_region.h
/// \brief A region of memory, in one piece or in rows, and copies between two of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "runtime/core/collective.h"

namespace alltoallv {

/// Where the next byte of a region lies. Two regions of as many bytes are copied by their bytes' order, whatever their
/// rows.
struct StridedRegion {
    char* at = nullptr;
    size_t row = SIZE_MAX;  ///< bytes; SIZE_MAX: all in one piece
    size_t stride = 0;      ///< bytes from a row to the next
    size_t used = 0;        ///< bytes of this row before `at`

    /// Returns how many of the next bytes are in one piece.
    size_t run() const { return row - used; }

    /// Goes on by up to `run()` bytes.
    void step(size_t bytes) {
        at += bytes;
        used += bytes;
        if (used == row) {
            at += stride - row;
            used = 0;
        }
    }

    /// Returns the region from another byte on.
    StridedRegion from(size_t bytes) const {
        if (bytes < run()) return {at + bytes, row, stride, used + bytes};
        const size_t all = used + bytes;
        return {at - used + all / row * stride + all % row, row, stride, all % row};
    }

    /// Returns the bytes from the first to the end of the last of so many, at least one.
    size_t extent(size_t bytes) const {
        if (bytes <= run()) return bytes;
        return (bytes - 1) / row * stride + (bytes - 1) % row + 1;
    }
};

/// Returns the region of rank `i` that begins at `first`.
inline StridedRegion region_of(const char* first, int64_t element, std::span<const Steps> steps, size_t i) {
    char* const at = const_cast<char*>(first);
    if (steps.empty() || steps[i].row == 0) return {at};
    return {at, static_cast<size_t>(steps[i].row * element), static_cast<size_t>(steps[i].stride * element)};
}

/// Calls `copy(to, from, bytes)` for each piece of the next `bytes`, and goes on in both regions.
template <class Copy>
void for_pieces(StridedRegion& to, StridedRegion& from, size_t bytes, Copy&& copy) {
    while (bytes > 0) {
        const size_t piece = std::min({bytes, to.run(), from.run()});
        copy(to.at, from.at, piece);
        to.step(piece);
        from.step(piece);
        bytes -= piece;
    }
}

/// Copies the next `bytes` with ordinary stores.
inline void copy_region(StridedRegion to, StridedRegion from, size_t bytes) {
    for_pieces(to, from, bytes, [](char* target, const char* source, size_t n) { std::memcpy(target, source, n); });
}

}  // namespace alltoallv
