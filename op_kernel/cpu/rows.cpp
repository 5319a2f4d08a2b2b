// Every row is read and written once, so that large ones are limited by memory alone.
#include "op_kernel/cpu/rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "op_kernel/cpu/clones.h"
#include "op_kernel/cpu/copy.h"
#include "op_kernel/cpu/elements.h"
#include "op_kernel/cpu/half_blocks.h"
#include "op_kernel/cpu/reduce.h"
#include "runtime/base/error.h"

namespace alltoallv::kernel {
namespace {

constexpr size_t streamed_from = size_t{32} << 20;  // what is written no longer fits into the caches
constexpr size_t streamed_row = 1024;
constexpr size_t block = 2048;  // elements in the first-level cache

Bytes* row(Rows rows, size_t i) {
    return static_cast<Bytes*>(rows.data) + i * rows.stride;
}

const Bytes* row(ConstRows rows, int64_t i) {
    return static_cast<const Bytes*>(rows.data) + static_cast<size_t>(i) * rows.stride;
}

ALLTOALLV_INLINE void multiply_block(Bytes* out, const Bytes* in, float factor, size_t count) {
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) store(out, k, load<float>(in, k) * factor);
}

constexpr auto& multiply = clones<multiply_block>;

}  // namespace

void gather_rows(Rows out, ConstRows in, const int64_t* index, const int64_t* where, size_t count, size_t bytes) {
    const bool streams = bytes >= streamed_row && count * bytes >= streamed_from;
    for (size_t i = 0; i < count && bytes > 0; ++i) {
        Bytes* to = row(out, where == nullptr ? i : static_cast<size_t>(where[i]));
        if (index[i] < 0)
            std::memset(to, 0, bytes);
        else
            copy(to, row(in, index[i]), bytes, streams);
    }
}

void weigh_rows(DType dtype, Rows out, ConstRows in, const int64_t* index, const float* weights, size_t count,
                size_t length) {
    const bool halves = dtype == DType::float16 || dtype == DType::bfloat16;
    if (!halves && dtype != DType::float32)
        throw invalid_param(1483, "dtype is ", name_of(dtype), ", expected float32, float16 or bfloat16");
    const auto times = multiply[best_isa()];
    if (!halves) {
        for (size_t i = 0; i < count; ++i) times(row(out, i), row(in, index[i]), weights[i], length);
        return;
    }
    const HalfBlocks half = half_blocks(dtype, best_isa());
    alignas(64) Bytes wide[block * sizeof(float)];
    for (size_t i = 0; i < count; ++i) {
        for (size_t first = 0; first < length; first += block) {
            const size_t n = std::min(block, length - first), at = first * size_of(dtype);
            half.widen(wide, row(in, index[i]) + at, n);
            times(wide, wide, weights[i], n);
            half.narrow(row(out, i) + at, wide, n);
        }
    }
}

void sum_rows(DType dtype, Rows out, ConstRows in, const int64_t* index, size_t terms, size_t count, size_t length) {
    const std::vector<Bytes> zeros(length * size_of(dtype));
    std::vector<const void*> chosen(terms);
    for (size_t i = 0; i < count; ++i) {
        for (size_t term = 0; term < terms; ++term) {
            const int64_t from = index[i * terms + term];
            chosen[term] = from < 0 ? zeros.data() : row(in, from);
        }
        reduce(dtype, ReduceOp::sum, row(out, i), chosen.data(), terms, length);
    }
}

}  // namespace alltoallv::kernel
