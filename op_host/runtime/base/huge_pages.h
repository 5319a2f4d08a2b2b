// Moves memory into huge pages, as long as the kernel does not take too long.
#pragma once

#include <sys/mman.h>

#include <chrono>
#include <cstddef>

namespace alltoallv {

/// Call `gather` for one block after the other. A block that is a huge page already costs a microsecond.
class HugePages {
  public:
    static constexpr size_t size = size_t{2} << 20;

    /// Returns false if the kernel refuses: it has no free huge page, or the block is not completely mapped or has no
    /// page in memory.
    bool gather(char* block) {
        patience_ += as_small_pages;
        return madvise(block, size, collapse) == 0;
    }

    /// False once it has taken longer than filling such blocks page by page: then the kernel must first make room.
    bool worthwhile() const { return std::chrono::steady_clock::now() <= patience_; }

  private:
    static constexpr int collapse = 25;  // MADV_COLLAPSE, Linux 6.1; works whatever the settings in sysfs are
    static constexpr std::chrono::milliseconds as_small_pages{2};

    std::chrono::steady_clock::time_point patience_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(10);
};

}  // namespace alltoallv
