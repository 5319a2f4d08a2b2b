#include "runtime/shm/cut_pages.h"

#include <sys/mman.h>

#include <algorithm>

#include "runtime/base/pages.h"

namespace alltoallv {
namespace {

bool map_at(char* address, size_t bytes, int visibility, int fd, int64_t offset) {
    return mmap(address, bytes, PROT_READ | PROT_WRITE, visibility | MAP_FIXED, fd, offset) != MAP_FAILED;
}

/// Makes each page this process's own by writing to it, page by page.
void make_own(char* begin, size_t bytes) {
    constexpr int populate_write = 23;  // MADV_POPULATE_WRITE, Linux 5.14
    if (madvise(begin, bytes, populate_write) == 0) return;
    for (size_t at = 0; at < bytes; at += page_size()) __atomic_fetch_or(begin + at, char{0}, __ATOMIC_RELAXED);
}

}  // namespace

bool CutPages::cut(int fd, char* base, const char* data, size_t bytes) {
    const size_t page = page_size();
    const auto first = static_cast<size_t>(data - base) / page * page;
    const auto last = (static_cast<size_t>(data - base) + bytes + page - 1) / page * page;
    for (size_t at = first; at < last;) {
        size_t end = at;  // end of pages that have not been cut before
        while (end < last && !overlaps(base + end, page)) end += page;
        if (end > at) {
            const auto offset = static_cast<int64_t>(at);
            if (!map_at(base + at, end - at, MAP_PRIVATE, fd, offset)) return false;
            ranges_.push_back({base + at, end - at, fd, offset});
            make_own(base + at, end - at);
        }
        at = end + page;
    }
    return true;
}

bool CutPages::mend(const char* data, size_t bytes) {
    std::erase_if(ranges_, [&](const Range& range) {
        return range.overlaps(data, bytes) &&
               map_at(range.begin, range.bytes, MAP_SHARED | MAP_POPULATE, range.fd, range.offset);
    });
    return !overlaps(data, bytes);
}

bool CutPages::overlaps(const char* data, size_t bytes) const {
    return std::ranges::any_of(ranges_, [&](const Range& range) { return range.overlaps(data, bytes); });
}

size_t CutPages::bytes() const {
    size_t total = 0;
    for (const Range& range : ranges_) total += range.bytes;
    return total;
}

}  // namespace alltoallv
