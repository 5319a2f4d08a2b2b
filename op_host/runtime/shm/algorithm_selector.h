/// \file algorithm_selector.h
/// \brief Finds the faster of two ways by taking both now and then.
///
/// Which way of moving private memory is faster depends on the machine, on its present load and on the size, by factors
/// of two in either direction.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <limits>

namespace alltoallv {

/// Decides per size, in powers of two. Not thread-safe.
class AlgorithmSelector {
  public:
    enum Way : unsigned char { usual, other };

    /// Returns the way to take for this number of bytes.
    Way choose(size_t bytes) {
        Record& record = of(bytes);
        const Way quicker = record.best(usual) <= record.best(other) ? usual : other;
        if (record.left == 0) {
            record.tries = !record.tries;
            record.left = record.tries ? trial : until_next;
            record.tried = quicker == usual ? other : usual;
        }
        --record.left;
        return record.tries ? record.tried : quicker;
    }

    /// Records how long they took by that way.
    void note(size_t bytes, Way way, double nanoseconds) {
        auto& last = of(bytes).last[way];
        std::rotate(last.begin(), last.end() - 1, last.end());
        last[0] = nanoseconds / static_cast<double>(bytes);
    }

  private:
    static constexpr int trial = 3;        // calls by the slower way
    static constexpr int until_next = 61;  // calls by the faster way, between trials

    struct Record {
        static constexpr double unknown = std::numeric_limits<double>::infinity();

        std::array<std::array<double, trial>, 2> last{{{unknown, unknown, unknown}, {unknown, unknown, unknown}}};
        int left = trial;  // calls until a trial begins or ends
        bool tries = false;
        Way tried = usual;

        /// Returns nanoseconds per byte: the minimum, because an interruption makes single calls slower.
        double best(Way way) const { return *std::min_element(last[way].begin(), last[way].end()); }
    };

    Record& of(size_t bytes) { return by_size_[static_cast<size_t>(std::bit_width(bytes))]; }

    std::array<Record, std::numeric_limits<size_t>::digits + 1> by_size_;
};

}  // namespace alltoallv
