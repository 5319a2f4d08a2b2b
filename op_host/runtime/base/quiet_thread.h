// Starts threads of the core besides the program's own.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "runtime/base/resources.h"

namespace alltoallv {

/// Starts a thread that receives only signals of its own faults, so the program's threads handle all others. `purpose`
/// is for the error if the thread cannot be started.
template <class Body>
std::thread quiet_thread(const char* name, const std::string& purpose, Body&& body) {
    sigset_t all, before;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread thread;
    int refused = 0;
    try {
        thread = std::thread(std::forward<Body>(body));
    } catch (const std::system_error& error) {
        refused = error.code().value();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (refused != 0) throw ran_out("no thread can be made for " + purpose, refused);
    pthread_setname_np(thread.native_handle(), name);
    return thread;
}

}  // namespace alltoallv
