/// \file wait.h
/// \brief Waiting for peers: spin briefly, then yield, then sleep on the doorbell.
#pragma once

#include <sched.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/layout.h"

namespace alltoallv {

using Clock = std::chrono::steady_clock;

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

/// Sleeping and waking over the control segment's one doorbell.
class Doorbell {
  public:
    explicit Doorbell(ControlHeader& header) : header_(header) {}

    /// After a release store that somebody may wait for. Costs one fence when nobody sleeps.
    void ring() {
        ring_if([] { return true; });
    }

    /// The same where `completes` says whether anybody's wait ends now. Of several who store at once, the last to get
    /// here sees what all of them have stored.
    template <class Completes>
    void ring_if(Completes&& completes) {
#if defined(__SANITIZE_THREAD__)  // which knows no fences
        if (header_.sleepers.fetch_add(0, std::memory_order_seq_cst) > 0 && completes()) wake();
#else
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (header_.sleepers.load(std::memory_order_relaxed) > 0 && completes()) wake();
#endif
    }

    /// Sleeps until the doorbell rings, at most `limit_ms`, unless `ready` holds already.
    template <class Ready>
    bool sleep(Ready&& ready, int limit_ms) {
        header_.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = header_.doorbell.load(std::memory_order_seq_cst);
        const bool done = ready();
        if (!done) futex_wait(seen, limit_ms);
        header_.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        return done;
    }

  private:
    void wake();
    void futex_wait(uint32_t seen, int limit_ms);

    ControlHeader& header_;
};

}  // namespace alltoallv
