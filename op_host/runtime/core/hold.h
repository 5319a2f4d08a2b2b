/// \file hold.h
/// \brief What a thread keeps during a small call, and lets go of before it waits for long.
///
/// The binding keeps Python's lock so: to give it up and take it back costs a third of a small exchange.
#pragma once

#include <chrono>

namespace alltoallv {

class Hold {
  public:
    Hold() : outer_(current()) { current() = this; }
    virtual ~Hold() { current() = outer_; }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

    /// Called on the thread that made it; the second call does nothing.
    virtual void let_go() = 0;

    /// Call it before a wait that may last.
    static void let_go_now() {
        if (current() != nullptr) current()->let_go();
    }

    /// Call it during a wait.
    static void let_go_after(std::chrono::nanoseconds waited) {
        if (waited > patience) let_go_now();
    }

  private:
    /// Far below the 5 ms for which Python lets a thread keep its lock.
    static constexpr auto patience = std::chrono::microseconds(200);

    static Hold*& current() {
        [[gnu::tls_model("initial-exec")]] static constinit thread_local Hold* hold = nullptr;
        return hold;
    }

    Hold* outer_;
};

}  // namespace alltoallv
