/// \file cut_pages.h
/// \brief Replaces pages of shared memory by private copies at the same addresses.
///
/// A peer that continues late writes into the shared pages, which nobody here sees any more (LATE in
/// control/row_protocol.pml).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace alltoallv {

/// Not thread-safe: its owner's mutex guards it.
class CutPages {
  public:
    /// Cuts the pages of `[data, data + bytes)` out of the shared mapping of `fd` at `base`. Keeps their contents, also
    /// what other threads write meanwhile. Returns false, without any change, if memory is short.
    bool cut(int fd, char* base, const char* data, size_t bytes);

    /// Maps the shared pages again, for memory that nobody uses. Returns false if that is not possible now.
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
