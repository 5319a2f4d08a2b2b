/// \file oversubscription.h
/// \brief Finds out if other programs compete for the processors, so that yielding costs time slices.
///
/// A rank that yields to a peer gets the processor back in microseconds. If other programs compute, it gives its time
/// slice to them and waits for milliseconds; a rank that sleeps runs again at once when it is woken.
#pragma once

#include <chrono>

#include "runtime/base/processors.h"
#include "runtime/base/unique_fd.h"

namespace alltoallv {

/// Knowledge that one rank gains by yielding. Not thread-safe.
class Oversubscription {
  public:
    explicit Oversubscription(int ranks);

    /// Sets the number of processors that the ranks share.
    void set_cpus(int cpus) { cpus_ = cpus; }

    /// Call it once per wait: true if the rank should sleep instead of yielding. Now and then yielding is tried again.
    bool present() { return sleeps_ > 0 && --sleeps_ > 0; }

    /// Yields once; true if that cost a time slice. `now` is the time of this rank's last look, before and after.
    bool yield(Clock::time_point& now) {
        const auto before = now;
        sched_yield();
        ++tried_;
        now = Clock::now();
        return now - before > long_yield && was_preempted();
    }

  private:
    /// Longer than most peers copy without looking at the others, shorter than a time slice.
    static constexpr auto long_yield = std::chrono::microseconds(400);
    static constexpr int fewest = 64, most = 4096;

    bool was_preempted();

    /// Returns the threads of this host that run or could run now; 0 if unknown.
    int runnable_threads();

    int ranks_, cpus_;
    int sleeps_ = 0;       // waits until yielding is tried again
    int period_ = fewest;  // of sleeps_
    int tried_ = 0;        // yields since then
    UniqueFd loadavg_;     // kept open: opening it takes five times as long as reading it
};

}  // namespace alltoallv
