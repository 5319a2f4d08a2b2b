/// \file token_terms.h
/// \brief What ranks agree on that move tokens to experts or back, whose rows travel as bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "runtime/core/peer_names.h"

namespace alltoallv {

/// The terms of an all_to_all_v for Exchange::root: a digest of them all, and for error texts the dtype and the
/// elements of a row. Dtypes outside the table differ in the digest.
constexpr int64_t token_terms(std::optional<DType> dtype, int64_t elements, uint32_t digest) {
    const int64_t number = dtype ? static_cast<int64_t>(*dtype) : 0xff;
    return (std::min<int64_t>(elements, 0x7fffff) << 8 | number) << 32 | digest;
}

inline std::string describe_token_terms(int64_t terms) {
    if (terms == 0) return "no tokens";  // a plain all_to_all_v
    const auto dtype = static_cast<DType>(terms >> 32 & 0xff);
    return "tokens of " + std::to_string(terms >> 40) + " elements of " + peer_name(dtype);
}

}  // namespace alltoallv
