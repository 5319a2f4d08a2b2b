/// \file quant_reduction.h
/// \brief The request of a rank to a communicator for a reduction whose terms travel as codes. docs/quantization.md has
/// the rules.
#pragma once

#include <cstdint>
#include <span>

#include "runtime/base/code_format.h"
#include "runtime/base/dtype.h"
#include "runtime/core/collective.h"

namespace alltoallv {

enum class QuantMode : uint8_t {
    dynamic,       ///< every rank computes scales per group
    shared_scale,  ///< int8 input; one scale, or one per channel, equal on all ranks
    two_scales,    ///< codes by a first shared scale, their sum as codes by a second
};

/// Sum over all ranks. All members but the pointers are equal on all ranks; the caller has checked them with `check`.
struct QuantReduction {
    OpKind op = OpKind::quantized_all_reduce;  ///< or quantized_reduce_scatter, in the dynamic mode
    QuantMode mode = QuantMode::dynamic;
    DType dtype = DType::float32;      ///< of the input: float32, float16, bfloat16; int8 with a shared scale
    DType out_dtype = DType::float32;  ///< float32, float16, bfloat16
    Overflow overflow = Overflow::saturate;
    /// Elements of each rank's part, in rank order; an all-reduce has one entry, all elements.
    std::span<const int64_t> counts;
    ShapeWords shape;  ///< of the input

    /// --- dynamic ---
    /// Of an all-reduce: if not 0, every rank's input holds leaves / W vectors, one after the other, each with codes of
    /// its own, and all are added in a tree (`kernel::Order::tree`).
    int64_t leaves = 0;
    bool average = false;      ///< divides the sum by the number of its terms
    bool requantizes = false;  ///< the sum of an all-reduce also travels as codes
    CodeFormat format = CodeFormat::int8;
    int64_t group_size = 128;  ///< elements per scale; groups begin at element 0 (of each part of a reduce_scatter)
    bool tells_bound = false;  ///< also computes what the result can be wrong by
    float* bounds = nullptr;   ///< one per group of the output; may be null if there are none

    /// --- shared scales: one value, or one per entry of the last axis ---
    std::span<const float> scale;
    std::span<const float> scale_2;  ///< as many as `scale`
    float offset = 0;                ///< added to the codes of every rank; not with two scales

    bool moves = true;  ///< false: only compare the ranks' rows; as in Exchange
    /// For tensors of a device: set to whether its kernels have been launched on `stream`, where they serve such a
    /// reduction; the same on all ranks. If not, the ranks' rows have only been compared.
    bool* launched = nullptr;
    void* stream = nullptr;
    const float *device_scale = nullptr, *device_offset = nullptr;  ///< as `scale` and `offset`, on the device
    const void* input = nullptr;
    void* output = nullptr;  ///< all elements, or this rank's part of a reduce_scatter

    /// Error feedback, on all ranks or none: float32, updated in place. May be null if there are no elements.
    bool feeds_back = false, gather_feeds_back = false;
    float* error = nullptr;         ///< one per element of the input
    float* gather_error = nullptr;  ///< for the second quantization, one per element of quant_part()
};

/// Throws invalid_param for options that exclude each other.
void check_options(const QuantReduction& reduction);

/// Throws invalid_param for a meaningless request.
void check(const QuantReduction& reduction);

int64_t total_count(const QuantReduction& reduction);

/// A rank's part of an all-reduce: equal shares of whole groups, fewer for the last ranks.
struct QuantPart {
    int64_t begin, count;
};
QuantPart quant_part(int64_t count, int64_t group_size, int size, int rank);

}  // namespace alltoallv
