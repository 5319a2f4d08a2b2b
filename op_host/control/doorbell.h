/// \file doorbell.h
/// \brief Sleeping until a peer has stored something, on the control segment's one futex.
#pragma once

#include <cstdint>

#include "control/layout.h"

namespace alltoallv {

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
