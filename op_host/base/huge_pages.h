// Memory brought together in huge pages, by a kernel that is not waited for too long.
#pragma once

#include <sys/mman.h>

#include <chrono>
#include <cstddef>

namespace alltoallv {

/// For blocks one after the other. A block that has been brought together before costs a microsecond.
class HugePages {
  public:
    static constexpr size_t size = size_t{2} << 20;

    /// False where the kernel does not: it has no free huge page, or the block is not mapped throughout. A block
    /// without any page is refused, too.
    bool gather(char* block) {
        patience_ += as_small_pages;
        return madvise(block, size, collapse) == 0;
    }

    /// False once it has taken longer than to fill such blocks page by page: the kernel has to make room first.
    bool worthwhile() const { return std::chrono::steady_clock::now() <= patience_; }

  private:
    static constexpr int collapse = 25;  // MADV_COLLAPSE, Linux 6.1; settings in sysfs do not forbid it
    static constexpr std::chrono::milliseconds as_small_pages{2};

    std::chrono::steady_clock::time_point patience_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(10);
};

}  // namespace alltoallv
