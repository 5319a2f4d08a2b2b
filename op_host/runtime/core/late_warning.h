// Warnings of a wait that is long.
#pragma once

#include <chrono>

#include "runtime/base/processors.h"
#include "runtime/core/hooks.h"

namespace alltoallv {

/// A wait that is told of after some seconds, and whenever it has become twice as long.
class LateWarning {
  public:
    explicit LateWarning(double seconds, Clock::time_point started = Clock::now())
        : started_(started), next_(after(seconds, started)) {}

    /// Call this often. `text` describes what has been awaited for so many seconds.
    template <class Text>
    void look(const Text& text) {
        const auto now = Clock::now();
        if (now < next_ || !hooks().warn) return;
        next_ = now + (now - started_);
        hooks().warn(text(std::chrono::duration<double>(now - started_).count()));
    }

  private:
    Clock::time_point started_, next_;
};

}  // namespace alltoallv
