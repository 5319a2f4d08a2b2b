/// \file quarantine.h
/// \brief Memory that late writers may still reach, until each of them has promised not to or has ended (LATE in
/// control/row_protocol.pml).
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "runtime/base/unique_fd.h"

namespace alltoallv {

/// Not thread-safe: its owner's mutex guards it.
class Quarantine {
  public:
    /// `review` runs on the reactor's thread now and then while ranges are waiting. It must call `settle` and `rest` at
    /// its end.
    explicit Quarantine(std::function<void()> review) : review_(std::move(review)) {}

    /// Returns false, and keeps nothing, if the range is clear.
    bool add(const char* data, size_t bytes, std::function<bool()> clear);
    bool covers(const char* data, size_t bytes) const;

    /// Forgets the ranges that are clear by now.
    void settle();

    /// Call it only from `review`: stops the reviews if no ranges are waiting.
    void rest();

  private:
    struct Range {
        const char* data;
        size_t bytes;
        std::function<bool()> clear;
    };

    void watch();

    std::function<void()> review_;
    std::vector<Range> ranges_;
    UniqueFd timer_;
};

}  // namespace alltoallv
