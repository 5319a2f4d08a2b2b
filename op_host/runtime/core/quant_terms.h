/// \file quant_terms.h
/// \brief The terms of a quantized reduction on which ranks must agree, as their rows carry them.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>

#include "runtime/core/quant_reduction.h"
#include "runtime/core/terms.h"

namespace alltoallv {

/// Lies at the beginning of a row's payload; `Row::terms` holds its digest.
struct alignas(64) QuantTerms {
    QuantMode mode;
    DType out_dtype;
    Overflow overflow;
    CodeFormat format;
    uint8_t requantizes;
    uint8_t feeds_back;  ///< 1: error feedback, 2: error feedback of the second quantization
    uint8_t tells_bound;
    uint16_t leaves;  ///< 0: none
    int64_t group_size;
    uint64_t scales;  ///< how many
    float scale, scale_2;
    float offset;
    uint64_t scale_digest, scale_2_digest;
};
static_assert(sizeof(QuantTerms) == 64);

/// Terms that a mode does not have are zero.
QuantTerms terms_of(const QuantReduction& reduction);

int64_t digest(const QuantTerms& terms);

/// Returns the first difference as "rank a has ..., rank b has ..."; empty if there is none.
std::string difference(const QuantTerms& a, int rank_a, const QuantTerms& b, int rank_b);

/// Terms on which ranks of a quantized_all_to_all must agree besides the bytes of a row.
struct RowTerms {
    uint64_t format : 6;
    uint64_t overflow : 2;
    uint64_t quantizes_gradient : 1;
    uint64_t out_dtype : 5;
    uint64_t dtype : 5;
    uint64_t group_size : 45;

    constexpr RowTerms(CodeFormat of, int64_t group, DType in, DType out, Overflow too_large, bool gradient)
        : format(static_cast<uint64_t>(of)),
          overflow(static_cast<uint64_t>(too_large)),
          quantizes_gradient(gradient),
          out_dtype(static_cast<uint64_t>(out)),
          dtype(static_cast<uint64_t>(in)),
          group_size(static_cast<uint64_t>(group)) {}
};
static_assert(code_format_table.size() <= 64 && std::size(overflow_names) <= 4 && dtype_table.size() <= 32);

/// Returns the first difference, as `difference` above does.
std::string difference(const RowTerms& a, int rank_a, const RowTerms& b, int rank_b);

}  // namespace alltoallv
