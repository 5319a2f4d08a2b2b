/// \file hooks.h
/// \brief Functions that the binding gives to the core: a check for Ctrl-C, the output of warnings, and its lock.
#pragma once

#include <functional>
#include <string>

namespace alltoallv {

struct Hooks {
    std::function<void()> poll;                    ///< called about every 20 ms by waiting threads; may throw
    std::function<void(const std::string&)> warn;  ///< receives warnings about late peers
    std::function<void(const std::function<void()>&)> unlocked;  ///< calls it without the lock that `poll` takes
};

/// Process-wide, set once before the first communicator is made.
inline Hooks& hooks() {
    static Hooks instance;
    return instance;
}

}  // namespace alltoallv
