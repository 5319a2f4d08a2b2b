// Tells a forked child from its parent, without a system call.
#pragma once

#include <cstdint>

namespace alltoallv {

/// Grows by one in every forked child; what was made under another value must not be used.
uint32_t fork_generation();

}  // namespace alltoallv
