/// \file private_blocks.h
/// \brief Keeps large blocks of private memory that were freed, because fresh pages cost more than what fills them.
#pragma once

#include <cstddef>
#include <vector>

namespace alltoallv {

/// The kernel may take the pages of kept blocks when memory is short. Not thread-safe: its owner's mutex guards it.
class PrivateBlocks {
  public:
    struct Memory {
        char* data;  // null: there is none
        size_t bytes;
    };

    /// Returns at least `bytes`, in huge pages if they are that large. Contents are undefined.
    Memory take(size_t bytes);

    /// Takes back what `take` returned: frees it, or keeps it if `keeps`.
    void give_back(Memory memory, bool keeps);

    /// Frees all that is kept.
    void clear();

  private:
    std::vector<Memory> kept_;  // the oldest first
};

}  // namespace alltoallv
