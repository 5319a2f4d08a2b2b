/// \file doorbell.h
/// \brief Sleeps until a peer has stored something, on a futex of the control segment.
#pragma once

#include <atomic>
#include <cstdint>

#include "runtime/control/layout.h"

namespace alltoallv {

/// Orders a store before a load of another word: of two threads that do so, one sees what the other has stored.
inline void full_fence() {
#if defined(__SANITIZE_THREAD__)  // it does not support fences
    static std::atomic<int> word{0};
    word.fetch_add(0, std::memory_order_seq_cst);
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

/// Sleeping and waking over a bell of the control segment.
class Doorbell {
  public:
    explicit Doorbell(Bell& bell) : bell_(bell) {}

    /// Call it after a release store for which somebody may wait. Costs one fence if nobody sleeps.
    void ring() {
        ring_if([] { return true; });
    }

    /// Rings only if `completes`, which says if anybody's wait ends now. Of several threads that store at the same
    /// time, the last one here sees what all of them have stored.
    template <class Completes>
    void ring_if(Completes&& completes) {
        full_fence();
        if (bell_.sleepers.load(std::memory_order_relaxed) > 0 && completes()) wake();
    }

    /// Sleeps until the bell rings, at most `limit_ms`, unless `ready` is already true. Returns true if it knows that
    /// `ready` is.
    template <class Ready>
    bool sleep(Ready&& ready, int limit_ms) {
        const Sleeper sleeper(bell_);
        const uint32_t seen = bell_.rung.load(std::memory_order_seq_cst);
        if (ready()) return true;
        if (futex_wait(seen, limit_ms) || !ready()) return false;
        if (bell_.rung.load(std::memory_order_seq_cst) == seen) unrung_.fetch_add(1, std::memory_order_relaxed);
        return true;
    }

    /// Returns how many sleeps of this process have ended only because they looked: who had stored what they waited for
    /// had not rung. Now and then one counts whose bell rings a moment later.
    static uint64_t unrung() { return unrung_.load(std::memory_order_relaxed); }

  private:
    struct Sleeper {
        explicit Sleeper(Bell& at) : bell(at) { bell.sleepers.fetch_add(1, std::memory_order_seq_cst); }
        ~Sleeper() { bell.sleepers.fetch_sub(1, std::memory_order_seq_cst); }
        Sleeper(const Sleeper&) = delete;
        Sleeper& operator=(const Sleeper&) = delete;

        Bell& bell;
    };

    void wake();
    bool futex_wait(uint32_t seen, int limit_ms);  // false if the time is over

    static inline constinit std::atomic<uint64_t> unrung_{0};

    Bell& bell_;
};

}  // namespace alltoallv
