/// \file peer_names.h
/// \brief Names for values that a peer has announced, which may not be in any table.
#pragma once

#include <string>

#include "runtime/base/code_format.h"
#include "runtime/base/dtype.h"

namespace alltoallv {

constexpr bool is_known(DType dtype) {
    return only_moves(dtype) || static_cast<size_t>(dtype) < dtype_table.size();
}

inline std::string peer_name(DType dtype) {
    return is_known(dtype) ? std::string(name_of(dtype)) : "unknown";
}

inline std::string peer_name(CodeFormat format) {
    return static_cast<size_t>(format) < code_format_table.size() ? std::string(info(format).name) : "unknown";
}

}  // namespace alltoallv
