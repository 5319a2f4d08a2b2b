#include "runtime/core/regions.h"

#include <algorithm>
#include <vector>

namespace alltoallv {
namespace {

std::string entry(std::string_view array, size_t index) {
    return std::string(array) + "[" + std::to_string(index) + "]";
}

std::string region(int64_t displ, int64_t count, int64_t row) {
    return "[" + std::to_string(displ / row) + ", " + std::to_string((displ + count) / row) + ")";
}

struct Names {
    std::string_view counts, displs, tensor;
};

constexpr Names send_names{"send_counts", "sdispls", "input"};
constexpr Names receive_names{"recv_counts", "rdispls", "output"};

/// Checks lengths, signs, overflow, and bounds if `numel` is known. Returns the end of the last non-empty region.
int64_t check_regions(const Names& names, int64_t numel, std::span<const int64_t> counts,
                      std::span<const int64_t> displs, int world_size, int64_t row) {
    check_length(names.counts, counts, world_size);
    check_length(names.displs, displs, world_size);
    check_signs(names.counts, counts, row);
    check_signs(names.displs, displs, row);
    const int64_t limit = numel < 0 ? int64_max : numel;
    int64_t span = 0;
    for (size_t j = 0; j < counts.size(); ++j) {
        if (counts[j] == 0) continue;
        if (counts[j] > limit || displs[j] > limit - counts[j]) {
            throw invalid_param(1077, entry(names.displs, j) + " + " + entry(names.counts, j) + " is " +
                                          std::to_string(displs[j] / row) + " + " + std::to_string(counts[j] / row) +
                                          ", expected at most " + std::to_string(limit / row) +
                                          (numel < 0 ? ", the largest 64-bit count"
                                                     : std::string(row > 1 ? ", the rows" : ", the elements") +
                                                           " of the " + std::string(names.tensor)));
        }
        span = std::max(span, displs[j] + counts[j]);
    }
    return span;
}

[[noreturn]] void throw_overlap(std::span<const int64_t> counts, std::span<const int64_t> displs, int64_t row, size_t a,
                                size_t b) {
    if (a > b) std::swap(a, b);
    throw invalid_param(1078, "the receive regions of ranks " + std::to_string(a) + " and " + std::to_string(b) +
                                  " overlap: rank " + std::to_string(a) + " writes " +
                                  region(displs[a], counts[a], row) + " of the output, rank " + std::to_string(b) +
                                  " writes " + region(displs[b], counts[b], row));
}

}  // namespace

void check_length(std::string_view name, std::span<const int64_t> values, int world_size) {
    if (world_size >= 0 && values.size() == static_cast<size_t>(world_size)) return;
    throw invalid_param(1054, std::string(name) + " has " + std::to_string(values.size()) + " entries, expected " +
                                  std::to_string(world_size) + ", one per rank");
}

Error too_small(std::string_view name, std::string_view value, int64_t least) {
    return invalid_param(1079, name, " is ", value, ", expected at least ", least);
}

Error no_rank(std::string_view name, std::string_view value, int size) {
    return invalid_param(1046, name, " is ", value, ", expected 0 <= ", name, " < ", size);
}

void check_signs(std::string_view name, std::span<const int64_t> values, int64_t row) {
    for (size_t i = 0; i < values.size(); ++i) {
        if (values[i] >= 0) continue;
        throw too_small(entry(name, i), std::to_string(values[i] / row), 0);
    }
}

void check_send(int64_t numel, std::span<const int64_t> counts, std::span<const int64_t> displs, int world_size,
                int64_t row) {
    check_regions(send_names, std::max<int64_t>(numel, 0), counts, displs, world_size, row);
}

int64_t check_receive(int64_t numel, std::span<const int64_t> counts, std::span<const int64_t> displs, int world_size,
                      int64_t row) {
    const int64_t span = check_regions(receive_names, numel, counts, displs, world_size, row);
    check_no_overlap(counts, displs, row);
    return span;
}

void check_no_overlap(std::span<const int64_t> counts, std::span<const int64_t> displs, int64_t row) {
    size_t last = counts.size();  // the last non-empty region so far
    bool is_ascending = true;
    for (size_t j = 0; j < counts.size() && is_ascending; ++j) {
        if (counts[j] == 0) continue;
        if (last != counts.size()) {
            is_ascending = displs[j] >= displs[last];
            if (is_ascending && displs[j] < displs[last] + counts[last]) throw_overlap(counts, displs, row, last, j);
        }
        last = j;
    }
    if (is_ascending) return;

    std::vector<size_t> order;
    order.reserve(counts.size());
    for (size_t j = 0; j < counts.size(); ++j) {
        if (counts[j] != 0) order.push_back(j);
    }
    std::ranges::sort(order,
                      [&](size_t a, size_t b) { return displs[a] != displs[b] ? displs[a] < displs[b] : a < b; });
    // If any two regions overlap, then so do two neighbours in this order.
    for (size_t k = 1; k < order.size(); ++k) {
        const size_t before = order[k - 1], after = order[k];
        if (displs[after] < displs[before] + counts[before]) throw_overlap(counts, displs, row, before, after);
    }
}

}  // namespace alltoallv
