// State of this process that a forked child does not take over.
#pragma once

#include <pthread.h>

namespace alltoallv {

/// The one `State`, which has a `std::mutex mutex`. Made at first use and never destroyed: threads may still use it
/// while the process ends. A forked child begins with a new one: what the parent had belongs to the parent, and threads
/// that it had there do not exist. The child's copy of it is kept reachable, as it is but for what `State::forget()`,
/// if there is one, does.
template <class State>
class ProcessState {
  public:
    static State& get() {
        [[maybe_unused]] static const int made = [] {
            current_ = new Kept;
            return pthread_atfork([] { current_->state.mutex.lock(); }, [] { current_->state.mutex.unlock(); }, renew);
        }();
        return current_->state;
    }

  private:
    struct Kept {
        State state;
        Kept* parents = nullptr;
    };

    static void renew() {
        Kept* const old = current_;
        if constexpr (requires { old->state.forget(); }) old->state.forget();
        old->state.mutex.unlock();
        current_ = new Kept;
        current_->parents = old;
    }

    static inline Kept* current_ = nullptr;
};

}  // namespace alltoallv
