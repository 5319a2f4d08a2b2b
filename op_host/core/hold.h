/// \file hold.h
/// \brief What a thread keeps while an operator of its runs, and lets go of before the operator waits for long.
///
/// The binding keeps Python's lock so: to give it up and take it back costs as much as a small exchange.
#pragma once

#include <chrono>

namespace alltoallv {

class Hold {
  public:
    Hold() : outer_(current()) { current() = this; }
    virtual ~Hold() { current() = outer_; }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

    virtual void let_go() = 0;  ///< on the thread that made it; again, it does nothing

    /// Before waiting for who knows how long.
    static void let_go_all() {
        if (current() != nullptr) current()->let_go();
    }

    /// After having waited for so long.
    static void let_go_after(std::chrono::nanoseconds waited) {
        if (waited > patience) let_go_all();
    }

  private:
    /// Far below the 5 ms for which Python lets a thread keep its lock anyway.
    static constexpr auto patience = std::chrono::microseconds(200);

    static Hold*& current() {
        [[gnu::tls_model("initial-exec")]] static constinit thread_local Hold* hold = nullptr;
        return hold;
    }

    Hold* outer_;
};

}  // namespace alltoallv
