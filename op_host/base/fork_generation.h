// Tells a forked child from its parent, without a system call.
#pragma once

#include <cstdint>

namespace alltoallv {

/// Returns a number that differs in every forked child; objects made under another number must not be used.
uint32_t fork_generation();

}  // namespace alltoallv
