/// \file regions.h
/// \brief Checks bounds and overlap of one rank's regions. All throw invalid_param, code 1, with the array, the index,
/// the value and what was expected. `row`: the elements of a row, where the caller has counted rows.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "runtime/base/error.h"

namespace alltoallv {

inline constexpr int64_t int64_max = std::numeric_limits<int64_t>::max();

/// Checks that there is one entry per rank.
void check_length(std::string_view name, std::span<const int64_t> values, int world_size);

/// The error of a value below the least that it may have.
Error too_small(std::string_view name, std::string_view value, int64_t least);

/// The error of a value that is none of `size` ranks.
Error no_rank(std::string_view name, std::string_view value, int size);

/// Checks that no value is negative.
void check_signs(std::string_view name, std::span<const int64_t> values, int64_t row = 1);

/// Checks that the send regions [displs[j], displs[j] + counts[j]) lie in an input of `numel` elements. They may
/// overlap and leave gaps. Throws code 1 naming the array, the index, the value and what was expected.
void check_send(int64_t numel, std::span<const int64_t> counts, std::span<const int64_t> displs, int world_size,
                int64_t row = 1);

/// Checks that the receive regions lie in an output of `numel` elements (-1: not allocated yet) and do not overlap.
/// Empty regions never overlap, and their displacement need only be >= 0.
/// Returns the elements that the output needs, gaps included. O(W) without allocation if non-empty regions ascend,
/// else O(W log W).
int64_t check_receive(int64_t numel, std::span<const int64_t> counts, std::span<const int64_t> displs, int world_size,
                      int64_t row = 1);

/// Throws code 1, naming the two ranks and both regions, if two non-empty receive regions share an element. The caller
/// has checked lengths, signs and overflow.
void check_no_overlap(std::span<const int64_t> counts, std::span<const int64_t> displs, int64_t row = 1);

}  // namespace alltoallv
