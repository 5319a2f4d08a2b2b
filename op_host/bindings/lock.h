// Python's lock during a call.
#pragma once

#include <optional>

#include "bindings/gil.h"
#include "runtime/core/communicator.h"
#include "runtime/core/held_lock.h"

namespace alltoallv {

/// Releases Python's lock until the end of its life: at once, or if the call is small only before it waits for long.
class LockReleased final : public HeldLock {
  public:
    /// `bytes`: of the input or the output, whichever is larger.
    LockReleased(const Communicator& communicator, size_t bytes) {
        if (!communicator.releases_lock() || bytes > small) LockReleased::release();
    }

    void release() override {
        if (!released_) released_.emplace();
    }

  private:
    static constexpr size_t small = size_t{64} << 10;  // bytes that are copied in a few microseconds

    std::optional<GilReleased> released_;
};

}  // namespace alltoallv
