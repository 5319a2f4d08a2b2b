/// \file mismatch.h
/// \brief The error of counts that disagree, which every transport finds in its own way.
#pragma once

#include <cstdint>
#include <string_view>

#include "runtime/base/error.h"

namespace alltoallv {

/// What one rank sends another and that one expects, in `unit`; `from` and `to` are texts as "rank 1".
inline Error counts_disagree(std::string_view where, std::string_view from, int64_t sent, std::string_view to,
                             int64_t expected, std::string_view unit = "elements") {
    return peer_mismatch(3010, where, ": ", from, " sends ", sent, " ", unit, " to ", to, ", which expects ", expected);
}

}  // namespace alltoallv
