// Reads the user's counts: lists, tuples, arrays and tensors of integers, all at the same cost.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <span>

#include "runtime/core/request.h"

namespace alltoallv {

/// True if no code of the caller runs while these counts are read: None, plain integers, or an array of integers.
bool reads_in_place(nanobind::handle values);

/// Reads one integer per rank; signs and bounds are checked later, against the tensors. Throws invalid_param with
/// `name`, the value and what was expected.
void read_counts(const char* name, nanobind::handle values, std::span<int64_t> counts);

/// Reads a timeout: seconds above 0, or None, for which it returns a negative number.
double read_timeout(nanobind::handle timeout);

/// Reads a flag: any value, by Python's truth.
bool read_flag(nanobind::handle value);

/// True if counts count rows: 'row' does, 'element' does not, None does for an input of 2 or more dimensions.
bool reads_rows(nanobind::handle unit, size_t dimensions);

/// Reads the arguments of `all_to_all_v` for an input of that shape, and the shape of `out` if there is one.
Request read_all_to_all_v(int size, Shape input, nanobind::handle send_counts, nanobind::handle recv_counts,
                          nanobind::handle sdispls, nanobind::handle rdispls, nanobind::handle unit, const Shape* out);

/// Reads the arguments of `all_to_all_nd` for a contiguous input of that shape; nothing for other than plain integers
/// and lists of them, and for wrong ones.
std::optional<Request> read_all_to_all_nd(int size, int rank, Shape input, nanobind::handle scatter_dim,
                                          nanobind::handle gather_dim, nanobind::handle scatter_sizes,
                                          nanobind::handle gather_sizes);

/// Reads the arguments of `all_to_all_single`.
Request read_all_to_all_single(int size, Shape output, Shape input, nanobind::handle output_split_sizes,
                               nanobind::handle input_split_sizes, const SplitNames& names = {});

}  // namespace alltoallv
