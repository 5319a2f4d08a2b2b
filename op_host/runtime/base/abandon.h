// Objects of the parent that a forked child can neither use nor destroy.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace alltoallv {

/// Keeps `what` until the process ends. For objects with locks that a thread of the parent may hold, or with threads to
/// join, which do not exist in the child.
inline void abandon(std::shared_ptr<void> what) {
    static std::mutex mutex;
    static auto* kept = new std::vector<std::shared_ptr<void>>;  // never destroyed
    const std::lock_guard lock(mutex);
    kept->push_back(std::move(what));
}

}  // namespace alltoallv
