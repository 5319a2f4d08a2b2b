// The processors that this process may use, their caches, and the clock for waits.
#pragma once

#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

namespace alltoallv {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point then) {
    return std::chrono::duration<double>(Clock::now() - then).count();
}

/// Returns the time in so many seconds, infinity among them.
inline Clock::time_point after(double seconds, Clock::time_point since = Clock::now()) {
    return since + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e8)));
}

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#endif
}

/// Returns the number of processors that this process may use: its affinity mask, limited by the cgroup's CPU quota.
int usable_cpus();

/// Returns the number of processors of the host, limited by the cgroup's CPU quota (of either version of cgroups, in
/// the folder ``cgroup``), without the affinity mask.
int quota_cpus(const std::string& cgroup = "/sys/fs/cgroup");

/// A set of processors, as a bit mask.
using CpuSet = std::array<uint64_t, 16>;

/// Returns this process's affinity mask.
CpuSet affinity();

/// Returns the total size of the last-level caches of these processors in bytes; 32 MiB if the host does not report it.
/// Data that exceed them are better written past the caches.
size_t last_level_cache_bytes(const CpuSet& cpus);

}  // namespace alltoallv
