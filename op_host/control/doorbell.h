/// \file doorbell.h
/// \brief Sleeping until a peer has stored something, on a futex of the control segment.
#pragma once

#include <atomic>
#include <cstdint>

#include "control/layout.h"

namespace alltoallv {

/// Between a store and a load of another word: of two threads that do so, one sees what the other has stored.
inline void full_fence() {
#if defined(__SANITIZE_THREAD__)  // which knows no fences
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

    /// After a release store that somebody may wait for. Costs one fence when nobody sleeps.
    void ring() {
        ring_if([] { return true; });
    }

    /// The same where `completes` says whether anybody's wait ends now. Of several who store at once, the last to get
    /// here sees what all of them have stored.
    template <class Completes>
    void ring_if(Completes&& completes) {
        full_fence();
        if (bell_.sleepers.load(std::memory_order_relaxed) > 0 && completes()) wake();
    }

    /// Sleeps until the doorbell rings, at most `limit_ms`, unless `ready` holds already.
    template <class Ready>
    bool sleep(Ready&& ready, int limit_ms) {
        bell_.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = bell_.rung.load(std::memory_order_seq_cst);
        const bool done = ready();
        if (!done) futex_wait(seen, limit_ms);
        bell_.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        return done;
    }

  private:
    void wake();
    void futex_wait(uint32_t seen, int limit_ms);

    Bell& bell_;
};

}  // namespace alltoallv
