// Python's lock, for threads that may still want it when the program has ended.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace alltoallv {

/// Calls what enters Python. Up to 3.13 the interpreter ends a daemon thread that does so after the program's end, by
/// unwinding its stack, which would end the process with an error in the first destructor or handler. The thread waits
/// for the process's end here instead, as it does in Python from 3.14 on; no handler can catch this inside another.
template <class Call>
[[gnu::noinline]] auto enter_python(const Call& call) {
    struct Stay {
        bool returned = false;
        ~Stay() {
            while (!returned) ::pause();
        }
    } stay;
    const auto result = call();
    stay.returned = true;
    return result;
}

/// Holds the lock.
class GilHeld {
  public:
    GilHeld() : state_(enter_python(PyGILState_Ensure)) {}
    ~GilHeld() { PyGILState_Release(state_); }
    GilHeld(const GilHeld&) = delete;
    GilHeld& operator=(const GilHeld&) = delete;

  private:
    const PyGILState_STATE state_;
};

/// Has given up the lock, which the thread holds before and after.
class GilReleased {
  public:
    GilReleased() : thread_(PyEval_SaveThread()) {}
    ~GilReleased() {
        enter_python([this] { return PyEval_RestoreThread(thread_), true; });
    }
    GilReleased(const GilReleased&) = delete;
    GilReleased& operator=(const GilReleased&) = delete;

  private:
    PyThreadState* const thread_;
};

}  // namespace alltoallv
