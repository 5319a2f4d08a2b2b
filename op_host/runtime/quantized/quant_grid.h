// How a quantized reduction is cut into the ranks' parts and pieces, and the values that do not fit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "runtime/base/error.h"
#include "runtime/core/quant_reduction.h"
#include "runtime/quantized/quant_codecs.h"

namespace alltoallv {

/// Returns the part that each rank reduces.
inline std::vector<QuantPart> parts_of(const QuantReduction& q, int size) {
    const bool scatters = q.op == OpKind::quantized_reduce_scatter;
    const int64_t unit = q.mode == QuantMode::dynamic ? q.group_size : static_cast<int64_t>(cache_line);
    const int64_t count = total_count(q);
    std::vector<QuantPart> parts;
    for (int j = 0; j < size; ++j) {
        const int64_t begin = parts.empty() ? 0 : parts.back().begin + parts.back().count;
        parts.push_back(scatters ? QuantPart{begin, q.counts[static_cast<size_t>(j)]}
                                 : quant_part(count, unit, size, j));
    }
    return parts;
}

/// Calls `use` with the codec of the request's mode.
template <class Use>
void with_codec(const QuantReduction& q, const std::vector<QuantPart>& parts, Use&& use) {
    if (q.mode == QuantMode::shared_scale) {
        SharedScaleCodec codec(q);
        use(codec);
    } else if (q.mode == QuantMode::two_scales) {
        TwoScaleCodec codec(q);
        use(codec);
    } else {
        DynamicCodec codec(q, parts.size(), parts);
        use(codec);
    }
}

/// The parts of the vector, in elements, and their pieces.
struct QuantGrid {
    std::vector<QuantPart> parts;
    size_t span = 0;   // no piece crosses a multiple of it; 0: no limit
    size_t piece = 1;  // elements

    size_t longest() const {
        int64_t most = 0;
        for (const QuantPart& part : parts) most = std::max(most, part.count);
        return static_cast<size_t>(most);
    }
    size_t steps_per_span() const { return (span + piece - 1) / piece; }
    size_t steps() const {
        const size_t count = longest();
        if (span == 0) return (count + piece - 1) / piece;
        return count / span * steps_per_span() + (count % span + piece - 1) / piece;
    }
    QuantRange range(size_t part, size_t step) const {
        const auto count = static_cast<size_t>(parts[part].count);
        size_t begin = step * piece, end = begin + piece;
        if (span != 0) {
            const size_t base = step / steps_per_span() * span;
            begin = base + step % steps_per_span() * piece;
            end = std::min(begin + piece, base + span);
        }
        begin = std::min(begin, count);
        return {part, static_cast<size_t>(parts[part].begin) + begin, std::min(end, count) - begin};
    }
};

/// The first piece with a value that does not fit, equal on all ranks, because all see the same flags.
struct Misfit {
    std::optional<QuantRange> first;

    void note(const QuantRange& range) {
        if (!first || range.first < first->first) first = range;
    }
    void raise(const QuantReduction& q, const std::string& what) const {
        if (!first || q.overflow != Overflow::raise) return;
        throw value_overflow(6001, what, ": elements ", first->first, " to ", first->first + first->count - 1,
                             " of the result hold a value that ", name_of(q.out_dtype), " cannot");
    }
};

/// Returns the address of a piece in this rank's output.
inline char* output_at(const QuantReduction& q, const QuantGrid& grid, const QuantRange& range) {
    const bool scatters = q.op == OpKind::quantized_reduce_scatter;
    const size_t first = scatters ? range.first - static_cast<size_t>(grid.parts[range.part].begin) : range.first;
    return static_cast<char*>(q.output) + first * size_of(q.out_dtype);
}

}  // namespace alltoallv
