/// \file inside.h
/// \brief The calls that a thread is inside: while one waits, a signal handler of the program may make another.
#pragma once

namespace alltoallv {

/// While this object lives, the thread that made it is inside a call of the communicator for which `key` stands.
class Inside {
  public:
    /// `queued`: a call from the queue, which has the turn for one operator.
    explicit Inside(const void* key, bool queued = false) : key_(key), queued_(queued), outer_(innermost()) {
        innermost() = this;
    }
    ~Inside() { innermost() = outer_; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

    /// Returns the innermost of this thread's calls of that communicator, or null.
    static const Inside* of(const void* key) {
        const Inside* call = innermost();
        while (call != nullptr && call->key_ != key) call = call->outer_;
        return call;
    }

    bool queued() const { return queued_; }

  private:
    static const Inside*& innermost() {
        [[gnu::tls_model("initial-exec")]] static constinit thread_local const Inside* call = nullptr;
        return call;
    }

    const void* key_;
    const bool queued_;
    const Inside* outer_;
};

}  // namespace alltoallv
