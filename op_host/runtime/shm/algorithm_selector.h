/// \file algorithm_selector.h
/// \brief Finds the faster of two ways of moving data by taking both now and then.
///
/// Which way is faster depends on the machine, on its present load and on the size, by factors of two in either
/// direction, and neither the topology nor the caches that the system reports show it.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace alltoallv {

/// Decides per size, in powers of two. Not thread-safe.
///
/// A way is timed after so many operators of the size, whatever comes between them. Ranks that move alike take the same
/// way at the same time, and a rank's time is then what the way costs sender and receiver.
class AlgorithmSelector {
  public:
    /// `trial`: how many operators in a row a way is timed; fewer do where they take milliseconds.
    explicit AlgorithmSelector(uint64_t trial = 3) : trial_(trial) {}

    enum Way : unsigned char { usual, other };
    struct Choice {
        Way way = usual;
        bool timed = false;  // its time is to be noted
    };

    /// Returns the way to take for this number of bytes: the expected one, unless the other is known to be quicker.
    Choice choose(size_t bytes, Way expected = usual) {
        Record& record = of(bytes);
        const uint64_t number = record.operators++;
        const double times[] = {record.best(usual), record.best(other)};
        const Way unexpected = expected == usual ? other : usual;
        const bool known = std::max(times[usual], times[other]) < unknown;
        const Way best = known && times[unexpected] < worth_it * times[expected] ? unexpected : expected;
        const uint64_t place = place_of(number);
        if (place >= 2 * trial_) return {best, false};
        // The expected way comes first, in caches that it has filled itself.
        const Way tried = place < trial_ ? expected : unexpected;
        const bool hopeless = known && times[tried] > 1.5 * times[best] && number / period % hopeless_windows != 0;
        return hopeless ? Choice{best, false} : Choice{tried, true};
    }

    /// Records how long they took, where `choose` has asked for it.
    void note(size_t bytes, Way way, double nanoseconds) {
        Record& record = of(bytes);
        Times& times = record.times[way];
        const uint64_t number = record.operators - 1, window = number - place_of(number);
        if (times.window != window) times = {window, unknown, times.now};
        times.now = std::min(times.now, nanoseconds / static_cast<double>(bytes));
    }

  private:
    static constexpr double worth_it = 0.9;  // what the unexpected way may take, of the expected one's time
    static constexpr double unknown = std::numeric_limits<double>::infinity();
    static constexpr uint64_t period = 256;  // operators from one trial to the next
    static constexpr uint64_t hopeless_windows = 4;

    /// The least times per byte of the last two trials: an interruption makes single operators slower.
    struct Times {
        uint64_t window = 0;
        double now = unknown, before = unknown;
    };
    struct Record {
        std::array<Times, 2> times;
        uint64_t operators = 0;  // chosen for so far

        double best(Way way) const { return std::min(times[way].now, times[way].before); }
    };

    /// Returns how many operators before that one a trial has begun. There are more trials at the start, but none in
    /// the first operators: memory is new.
    static uint64_t place_of(uint64_t number) {
        if (number >= period) return number % period;
        return number >= 64 ? number - 64 : number >= 16 ? number - 16 : number >= 4 ? number - 4 : period;
    }
    Record& of(size_t bytes) { return by_size_[static_cast<size_t>(std::bit_width(bytes))]; }

    uint64_t trial_;
    std::array<Record, std::numeric_limits<size_t>::digits + 1> by_size_;
};

}  // namespace alltoallv
