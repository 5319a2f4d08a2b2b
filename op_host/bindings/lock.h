/// \file lock.h
/// \brief Python's lock while an operator runs.
#pragma once

#include <nanobind/nanobind.h>

#include "core/hold.h"

namespace alltoallv {

/// Given up at once, or, where the call is `brief`, only before it waits for long; taken back at the end.
class LockGivenUp final : public Hold {
  public:
    explicit LockGivenUp(bool brief) {
        if (!brief) LockGivenUp::let_go();
    }
    ~LockGivenUp() override {
        if (thread_ != nullptr) PyEval_RestoreThread(thread_);
    }

    void let_go() override {
        if (thread_ == nullptr) thread_ = PyEval_SaveThread();
    }

  private:
    PyThreadState* thread_ = nullptr;
};

}  // namespace alltoallv
