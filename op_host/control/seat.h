/// \file seat.h
/// \brief Ranks that outnumber the processors, spread evenly over them.
///
/// The kernel spreads what computes, in its own time; ranks that yield to each other all look busy to it, and three may
/// share a processor for tens of milliseconds beside one that has the other to itself. An operator then takes half as
/// long again.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>

#include "base/processors.h"

namespace alltoallv {

/// Where rank `rank` should move, given the processor of every rank: -1 to stay. Only ranks whose processor has two
/// more than another move, the last ranks first; every rank that knows the same comes to the same result.
int better_seat(int rank, std::span<const uint16_t> seats, const CpuSet& allowed);

/// The seat of one rank, a thread. Not thread-safe.
class Seat {
  public:
    /// The processor it runs on.
    static uint16_t current();

    /// Whether it is time to look at the others' again.
    bool due(Clock::time_point now) const { return now >= next_look_; }

    /// Moves the calling thread if that spreads the ranks better; its affinity mask is afterwards what it was.
    void level(int rank, std::span<const uint16_t> seats, const CpuSet& allowed, Clock::time_point now);

  private:
    static constexpr auto between_looks = std::chrono::milliseconds(1);
    static constexpr auto after_a_move = std::chrono::milliseconds(10);  // which costs tens of microseconds

    Clock::time_point next_look_{};
};

}  // namespace alltoallv
