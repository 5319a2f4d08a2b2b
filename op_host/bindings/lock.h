// Python's lock during a call.
#pragma once

#include <optional>

#include "bindings/gil.h"
#include "runtime/core/communicator.h"
#include "runtime/core/hold.h"

namespace alltoallv {

/// Releases Python's lock until the end of its life: at once, or if the call is small only before it waits for long.
class LockReleased final : public Hold {
  public:
    /// `bytes`: of the input or the output, whichever is larger.
    LockReleased(const Communicator& communicator, size_t bytes) {
        if (!communicator.lets_go() || bytes > small) LockReleased::let_go();
    }

    void let_go() override {
        if (!released_) released_.emplace();
    }

  private:
    static constexpr size_t small = size_t{64} << 10;  // bytes that are copied in a few microseconds

    std::optional<GilReleased> released_;
};

}  // namespace alltoallv
