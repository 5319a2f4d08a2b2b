// Keeps a few descriptors in reserve, so that a process that has used up all others can still answer its peers.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "runtime/base/process_state.h"
#include "runtime/base/unique_fd.h"

namespace alltoallv {

/// One object for this process; thread-safe. The descriptors stay open, on /dev/null, as long as somebody holds it.
class SpareDescriptors {
  public:
    /// Lends all of them to whoever opens descriptors meanwhile.
    class Lent {
      public:
        Lent() { instance().lend(true); }
        ~Lent() {
            instance().lend(false);
            instance().refill();
        }
        Lent(const Lent&) = delete;
        Lent& operator=(const Lent&) = delete;
    };

    static SpareDescriptors& instance() { return ProcessState<SpareDescriptors>::get(); }

    void hold();
    void release();

    /// Closes one, so that the next open() can use its number; false if none is left.
    bool give_one();

    /// Refills the reserve, after a descriptor that used a spare number has been closed.
    void refill();

    /// Closes the copies in a forked child.
    void forget() { spares_.clear(); }

    std::mutex mutex;  // for ProcessState

  private:
    void lend(bool begins);

    static constexpr size_t kept = 4;

    size_t holders_ = 0, lenders_ = 0;
    std::vector<UniqueFd> spares_;
};

}  // namespace alltoallv
