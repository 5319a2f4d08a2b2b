// A few descriptors kept for the day when this process has no more, so that it can still answer its peers.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "base/unique_fd.h"

namespace alltoallv {

/// Of this process; thread-safe. They are kept open, on /dev/null, as long as anybody holds them.
class SpareDescriptors {
  public:
    static SpareDescriptors& instance();

    void hold();
    void let_go();

    /// Closes one, whose number is the next that is opened; false: there is none left.
    bool give_one();

    /// After what a spare one was given for has been closed.
    void refill();

    /// In a forked child: closes its copies.
    static void forget();

  private:
    static constexpr size_t kept = 4;

    [[maybe_unused]] const SpareDescriptors* parents_ = nullptr;  // kept reachable
    std::mutex mutex_;
    size_t holders_ = 0;
    std::vector<UniqueFd> spares_;
};

}  // namespace alltoallv
