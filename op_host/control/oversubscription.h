/// \file oversubscription.h
/// \brief Whether programs that are none of our ranks compete for the processors, so that yielding costs time slices.
///
/// A rank that yields to a peer gets the processor back in microseconds. On a machine where strangers compute, it gives
/// up its time slice to them, and waits for milliseconds; one that sleeps is run again at once when it is woken.
#pragma once

#include <chrono>

#include "base/processors.h"
#include "base/unique_fd.h"

namespace alltoallv {

/// What one rank has found out by yielding. Not thread-safe.
class Oversubscription {
  public:
    explicit Oversubscription(int ranks);

    /// Processors that the ranks have together.
    void set_cpus(int cpus) { cpus_ = cpus; }

    /// Asked once per wait: true if it is better slept than yielded away. Now and then yielding is tried again.
    bool present() { return sleeps_ > 0 && --sleeps_ > 0; }

    /// Yields once; true if that cost a time slice. `now` is the time when this rank last looked, before and after.
    bool yield(Clock::time_point& now) {
        const auto before = now;
        sched_yield();
        ++tried_;
        now = Clock::now();
        return now - before > long_yield && was_preempted();
    }

  private:
    /// Longer than most peers copy between two looks at the others, shorter than a time slice.
    static constexpr auto long_yield = std::chrono::microseconds(400);
    static constexpr int fewest = 64, most = 4096;

    bool was_preempted();

    /// Threads of this host that run or could run now; 0 if that is not to be learnt.
    int runnable_threads();

    int ranks_, cpus_;
    int sleeps_ = 0;       // waits until yielding is tried again
    int period_ = fewest;  // of sleeps_
    int tried_ = 0;        // yields since
    UniqueFd loadavg_;     // open: opening it takes five times as long as reading it
};

}  // namespace alltoallv
