// Copies, weighs and adds rows that are chosen by number: what a mixture of experts does with its tokens.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/base/dtype.h"

namespace alltoallv::kernel {

/// Rows of equal length at any alignment, `stride` bytes apart.
struct ConstRows {
    const void* data;
    size_t stride;
};
struct Rows {
    void* data;
    size_t stride;
};

/// Row where[i] of `out`, row i without `where`, becomes row index[i] of `in`, i < count, each of `bytes`; -1 stands
/// for zeros.
void gather_rows(Rows out, ConstRows in, const int64_t* index, const int64_t* where, size_t count, size_t bytes);

/// Row i of `out` becomes row index[i] >= 0 of `in` times weights[i], computed in float32 and rounded once.
/// `dtype` is float32, float16 or bfloat16.
void weigh_rows(DType dtype, Rows out, ConstRows in, const int64_t* index, const float* weights, size_t count,
                size_t length);

/// Row i of `out` becomes the sum of the `terms` rows index[i * terms ...] of `in`, in their order, as reduce() adds
/// them; -1 stands for zeros.
void sum_rows(DType dtype, Rows out, ConstRows in, const int64_t* index, size_t terms, size_t count, size_t length);

}  // namespace alltoallv::kernel
