// State of this process that a forked child does not inherit.
#pragma once

#include <pthread.h>

namespace alltoallv {

/// Returns the process's only `State`, which has a `std::mutex mutex`. It is made at first use and never destroyed,
/// because threads may still use it while the process ends. A forked child starts with a new one: the parent's objects
/// belong to the parent, and its threads do not exist in the child. The child's copy of the old state stays reachable
/// and unchanged, except for what `State::forget()` does, if it exists.
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
