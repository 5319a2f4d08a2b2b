// Units and lengths of memory.
#pragma once

#include <cstddef>

namespace alltoallv {

inline constexpr size_t cache_line = 64;

constexpr size_t round_up(size_t value, size_t unit) {
    return (value + unit - 1) / unit * unit;
}

}  // namespace alltoallv
