// Counts as users give them: lists, tuples, arrays and tensors of integers, all at one price.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>

#include "core/request.h"

namespace alltoallv {

/// One integer per rank; signs and bounds are checked later, against the tensors.
/// Throws invalid_param with `name`, the value and what was expected.
void read_counts(const char* name, nanobind::handle values, std::span<int64_t> counts);

/// None, or seconds above 0; negative for None.
double read_timeout(nanobind::handle timeout);

/// Whether counts count rows: 'row', 'element', or None, which means rows of an input of 2 dimensions or more.
bool reads_rows(nanobind::handle unit, size_t dimensions);

/// The arguments of `all_to_all_v` for an input of that shape; an output of `out`'s where there is one.
Request read_all_to_all_v(int size, Shape input, nanobind::handle send_counts, nanobind::handle recv_counts,
                          nanobind::handle sdispls, nanobind::handle rdispls, nanobind::handle unit, const Shape* out);

/// Those of `all_to_all_single`.
Request read_all_to_all_single(int size, Shape output, Shape input, nanobind::handle output_split_sizes,
                               nanobind::handle input_split_sizes, const SplitNames& names = {});

}  // namespace alltoallv
