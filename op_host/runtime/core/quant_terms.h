/// \file quant_terms.h
/// \brief The terms of a quantized reduction on which ranks must agree, as their rows carry them.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>

#include "runtime/core/quant_reduction.h"

namespace alltoallv {

/// Lies at the beginning of a row's payload; `Row::root` holds its digest.
struct alignas(64) QuantTerms {
    QuantMode mode;
    DType out_dtype;
    Overflow overflow;
    CodeFormat format;
    uint8_t requantizes;
    uint8_t feeds_back;  ///< 1: error feedback, 2: error feedback of the second quantization
    uint8_t tells_bound;
    int64_t group_size;
    uint64_t scales;  ///< how many
    float scale, scale_2;
    float offset;
    uint32_t shape_digest;
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
    CodeFormat format;
    int64_t group_size;  ///< below 2^44
    DType dtype, out_dtype;
    Overflow overflow;
    bool quantizes_gradient;
};

/// Returns the terms as Exchange::root; `terms_difference` takes them apart.
constexpr int64_t packed(const RowTerms& terms) {
    const auto bits = [](auto value, int from) { return static_cast<int64_t>(value) << from; };
    return bits(terms.group_size, 19) | bits(terms.dtype, 14) | bits(terms.out_dtype, 9) |
           bits(terms.quantizes_gradient, 8) | bits(terms.overflow, 6) | bits(terms.format, 0);
}
static_assert(code_format_table.size() <= 64 && std::size(overflow_names) <= 4 && dtype_table.size() <= 32);

/// Returns the first difference between packed terms, as `difference` does.
std::string terms_difference(int64_t a, int rank_a, int64_t b, int rank_b);

}  // namespace alltoallv
