/// \file held_lock.h
/// \brief A lock that a thread keeps during a small call and releases before a long wait.
///
/// The binding keeps Python's lock so: to give it up and take it back costs a third of a small exchange.
#pragma once

#include <chrono>

namespace alltoallv {

class HeldLock {
  public:
    HeldLock() : outer_(current()) { current() = this; }
    virtual ~HeldLock() { current() = outer_; }
    HeldLock(const HeldLock&) = delete;
    HeldLock& operator=(const HeldLock&) = delete;

    /// Called on the thread that made it; the second call does nothing.
    virtual void release() = 0;

    /// Call it before a wait that may last.
    static void release_now() {
        if (current() != nullptr) current()->release();
    }

    /// Call it during a wait.
    static void release_after(std::chrono::nanoseconds waited) {
        if (waited > patience) release_now();
    }

  private:
    /// Far below the 5 ms for which Python lets a thread keep its lock.
    static constexpr auto patience = std::chrono::microseconds(200);

    static HeldLock*& current() {
        [[gnu::tls_model("initial-exec")]] static constinit thread_local HeldLock* innermost = nullptr;
        return innermost;
    }

    HeldLock* outer_;
};

}  // namespace alltoallv
