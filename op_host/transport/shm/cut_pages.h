/// \file cut_pages.h
/// \brief Pages of shared memory that this process has private copies of instead, at the same addresses.
///
/// A peer that goes on late writes into the shared pages, which nobody here sees any more (LATE in
/// control/row_protocol.pml).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace alltoallv {

/// Not thread-safe: its owner's mutex guards it.
class CutPages {
  public:
    /// The pages of `[data, data + bytes)`, of the shared mapping at `base` of `fd`. What they hold stays; what other
    /// threads of this process write meanwhile does too. False, and nothing has changed, without the memory for it.
    bool cut(int fd, char* base, const char* data, size_t bytes);

    /// Maps the shared pages again, for memory that nobody uses. False: not possible now.
    bool mend(const char* data, size_t bytes);

    bool overlaps(const char* data, size_t bytes) const;
    size_t bytes() const;

  private:
    struct Range {
        char* begin;
        size_t bytes;
        int fd;
        int64_t offset;

        bool overlaps(const char* data, size_t n) const { return data < begin + bytes && begin < data + n; }
    };

    std::vector<Range> ranges_;
};

}  // namespace alltoallv
