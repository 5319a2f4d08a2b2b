// The processors that this process may use, their caches, and the clock that waits are measured with.
#pragma once

#include <sched.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace alltoallv {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point then) {
    return std::chrono::duration<double>(Clock::now() - then).count();
}

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#endif
}

/// Processors this process may use: its affinity mask, further limited by the cgroup's CPU quota.
int usable_cpus();

/// The limit of the cgroup's CPU quota and of the host alone.
int quota_cpus();

/// A set of processors, bit by bit.
using CpuSet = std::array<uint64_t, 16>;

/// This process's affinity mask.
CpuSet affinity();

/// Bytes of the last-level caches of these processors together, each counted once; 32 MiB where the host does not say.
/// Data that outgrow them are better written past the caches.
size_t last_level_cache_bytes(const CpuSet& cpus);

}  // namespace alltoallv
