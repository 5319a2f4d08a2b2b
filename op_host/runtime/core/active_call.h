/// \file active_call.h
/// \brief The calls that a thread is inside: while one waits, a signal handler of the program may make another.
#pragma once

namespace alltoallv {

/// While this object lives, the thread that made it is inside a call of the communicator for which `key` stands.
class ActiveCall {
  public:
    /// `queued`: a call from the queue, which has the turn for one operator.
    explicit ActiveCall(const void* key, bool queued = false) : key_(key), queued_(queued), outer_(innermost()) {
        innermost() = this;
    }
    ~ActiveCall() { innermost() = outer_; }
    ActiveCall(const ActiveCall&) = delete;
    ActiveCall& operator=(const ActiveCall&) = delete;

    /// Returns the innermost of this thread's calls of that communicator, or null.
    static const ActiveCall* of(const void* key) {
        const ActiveCall* call = innermost();
        while (call != nullptr && call->key_ != key) call = call->outer_;
        return call;
    }

    bool queued() const { return queued_; }

  private:
    static const ActiveCall*& innermost() {
        [[gnu::tls_model("initial-exec")]] static constinit thread_local const ActiveCall* call = nullptr;
        return call;
    }

    const void* key_;
    const bool queued_;
    const ActiveCall* outer_;
};

}  // namespace alltoallv
