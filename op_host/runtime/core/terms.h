/// \file terms.h
/// \brief What the ranks of an operator agree on besides what a row has fields for: one word, whose form depends on the
/// operator. exchange_counts has the number of chunks in which a call begins; a quantized reduction has a digest
/// (core/quant_terms.h); a quantized_all_to_all has RowTerms, which stand there.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>

#include "runtime/core/peer_names.h"

namespace alltoallv {

template <class T>
constexpr int64_t word_of(const T& terms) {
    return std::bit_cast<int64_t>(terms);
}

/// Of a reduction and of a scan, as in `Reduction`.
struct ReductionTerms {
    uint64_t leaves : 32;
    uint64_t ordered : 1;
    uint64_t exclusive : 1;
    uint64_t unused : 30;
};

/// Of an all_to_all_v that moves tokens to experts or back, whose rows travel as bytes. Dtypes outside the table differ
/// in the digest.
struct TokenTerms {
    uint64_t digest : 32;  ///< of all terms; the others are for error texts
    uint64_t dtype : 8;
    uint64_t elements : 24;  ///< of a row; the largest stands for more

    constexpr TokenTerms(std::optional<DType> of, int64_t count, uint32_t of_all)
        : digest(of_all),
          dtype(of ? static_cast<uint64_t>(*of) : 0xff),
          elements(static_cast<uint64_t>(std::min<int64_t>(count, 0xffffff))) {}
};

/// Of an all_to_all_nd.
struct DimensionTerms {
    uint64_t gather : 8;
    uint64_t scatter : 8;
    uint64_t digest : 48;  ///< of the lengths of the other dimensions

    std::string text() const {
        return "scatters dimension " + std::to_string(scatter) + " and gathers dimension " + std::to_string(gather);
    }
};

inline std::string describe_tokens(int64_t word) {
    if (word == 0) return "no tokens";  // a plain all_to_all_v
    const auto terms = std::bit_cast<TokenTerms>(word);
    return "tokens of " + std::to_string(terms.elements) + " elements of " + peer_name(static_cast<DType>(terms.dtype));
}

}  // namespace alltoallv
