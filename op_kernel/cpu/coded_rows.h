// Rows that travel as codes: they are chosen by number, as the rows of `rows.h`, while they are encoded and decoded.
#pragma once

#include "op_kernel/cpu/quantize.h"
#include "op_kernel/cpu/rows.h"

namespace alltoallv::kernel {

/// Rows of `length` elements, each with its scales, its codes, and padding that aligns the next row's scales.
struct CodedRows {
    QuantFormat format;
    DType dtype;
    size_t length;

    /// Returns the bytes of a row with its padding.
    size_t bytes() const { return (used() + 3) / 4 * 4; }
    size_t used() const { return format.scale_bytes(length) + format.code_bytes(length); }

    /// Row i of `out` becomes the codes of row index[i] of `in`, of row i without an index, times weights[i] if there
    /// are weights.
    void encode(Rows out, ConstRows in, const int64_t* index, const float* weights, size_t count) const;

    /// Row where[i] of `out` becomes the values of row index[i] of `in`; without these arrays, row i. -1 stands for
    /// zeros. Returns false if a value did not fit and `overflow` is raise.
    bool decode(Rows out, ConstRows in, const int64_t* index, const int64_t* where, size_t count,
                Overflow overflow) const;

    /// Computes what decode() to the rows' type can be wrong by, for every group of every row.
    void bound(ConstRows in, size_t count, Overflow overflow, float* out) const;

    /// Does what sum_rows() does, with the values of rows of `in`.
    void sum(Rows out, ConstRows in, const int64_t* index, size_t terms, size_t count) const;
};

}  // namespace alltoallv::kernel
