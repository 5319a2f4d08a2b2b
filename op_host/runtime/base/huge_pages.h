// Moves memory into huge pages, as long as the kernel does not take too long.
#pragma once

#include <sys/mman.h>

#include <chrono>
#include <cstddef>
#include <ctime>

namespace alltoallv {

/// Call `gather` for one part after the other. What are huge pages already costs a microsecond each.
class HugePages {
  public:
    static constexpr size_t size = size_t{2} << 20;

    /// Moves `count` blocks. Returns false if the kernel refuses one: it has no free huge page, or the block is not
    /// completely mapped or has no page in memory. Each call waits until all processors have emptied their lists of
    /// pages, so few calls for many blocks are quicker, above all where other ranks compute.
    bool gather(char* blocks, size_t count = 1) {
        patience_ += as_small_pages * count;
        return madvise(blocks, count * size, collapse) == 0;
    }

    /// False once it has taken longer than filling such blocks page by page: then the kernel must first make room, or a
    /// virtual machine's host must first give the memory. Both take this thread's processor time, which is what counts:
    /// where ranks outnumber processors, a clock says nothing.
    bool worthwhile() const { return used() <= patience_; }

  private:
    using Time = std::chrono::nanoseconds;
    static constexpr int collapse = 25;  // MADV_COLLAPSE, Linux 6.1; works whatever the settings in sysfs are
    static constexpr std::chrono::milliseconds as_small_pages{1};

    static Time used() {
        timespec time{};
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return std::chrono::seconds(time.tv_sec) + Time(time.tv_nsec);
    }

    Time patience_ = used() + as_small_pages;
};

}  // namespace alltoallv
