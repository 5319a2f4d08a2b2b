// Tells a forked child from its parent, without a system call.
#pragma once

#include <atomic>
#include <cstdint>

namespace alltoallv {

/// Counts the forks that have led to this process.
extern constinit std::atomic<uint32_t> forks_above;

/// Returns a number that differs in every forked child; objects made under another number must not be used.
inline uint32_t fork_generation() {
    return forks_above.load(std::memory_order_relaxed);
}

}  // namespace alltoallv
