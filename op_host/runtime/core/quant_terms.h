/// \file quant_terms.h
/// \brief The terms of a quantized reduction on which ranks must agree, as their rows carry them.
#pragma once

#include <cstdint>
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

/// Terms on which peers of a quantized_all_to_all must agree besides the bytes of a row, for Exchange::root.
constexpr int64_t row_terms(CodeFormat format, int64_t group_size) {
    return group_size << 8 | static_cast<int64_t>(format);
}
std::string describe_row_terms(int64_t terms);

}  // namespace alltoallv
