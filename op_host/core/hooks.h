/// \file hooks.h
/// \brief What the binding lends the core: a look for Ctrl-C, and a place for warnings.
#pragma once

#include <functional>
#include <string>

namespace alltoallv {

struct Hooks {
    std::function<void()> poll;                    ///< called about every 20 ms by whoever waits; may throw
    std::function<void(const std::string&)> warn;  ///< receives warnings about late peers
};

/// Process-wide, set once before the first communicator is made.
inline Hooks& hooks() {
    static Hooks instance;
    return instance;
}

}  // namespace alltoallv
