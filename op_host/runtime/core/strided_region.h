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

/// Pieces of one length, each `to_step` and `from_step` bytes after the one before.
struct CopiedRows {
    char* to;
    const char* from;
    size_t bytes, number, to_step, from_step;

    /// With ordinary stores.
    void copy() const {
        for (size_t i = 0; i < number; ++i) std::memcpy(to + i * to_step, from + i * from_step, bytes);
    }
};

/// Calls `copy(CopiedRows)` for the next `bytes`, and goes on in both regions. Rows of one side that lie one after the
/// other in a piece, or in rows as long, of the other side come together.
template <class Copy>
void for_pieces(StridedRegion& to, StridedRegion& from, size_t bytes, Copy&& copy) {
    while (bytes > 0) {
        CopiedRows next{to.at, from.at, std::min({bytes, to.run(), from.run()}), 1, 0, 0};
        const bool rows_to = to.used == 0 && next.bytes == to.row, rows_from = from.used == 0 && next.bytes == from.row;
        const size_t within = std::min({bytes, rows_to ? SIZE_MAX : to.run(), rows_from ? SIZE_MAX : from.run()});
        if (rows_to || rows_from) next.number = within / next.bytes;
        next.to_step = rows_to ? to.stride : next.bytes;
        next.from_step = rows_from ? from.stride : next.bytes;
        copy(next);
        const size_t copied = next.bytes * next.number;
        to = to.from(copied);
        from = from.from(copied);
        bytes -= copied;
    }
}

/// Copies the next `bytes` with ordinary stores.
inline void copy_region(StridedRegion to, StridedRegion from, size_t bytes) {
    for_pieces(to, from, bytes, [](const CopiedRows& all) { all.copy(); });
}

}  // namespace alltoallv
