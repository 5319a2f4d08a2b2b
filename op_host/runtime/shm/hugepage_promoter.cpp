#include "runtime/shm/hugepage_promoter.h"

#include <algorithm>
#include <cstdint>

#include "runtime/base/huge_pages.h"

namespace alltoallv {
namespace {

/// Moves blocks into huge pages if at least half of them lies in the input: the rest is memory of this process as well,
/// or they stay unchanged.
void gather(uintptr_t begin, uintptr_t end) {
    HugePages pages;
    for (uintptr_t at = begin / HugePages::size * HugePages::size; at < end && pages.worthwhile();
         at += HugePages::size)
        if (std::min(end, at + HugePages::size) - std::max(begin, at) >= HugePages::size / 2)
            (void)pages.gather(reinterpret_cast<char*>(at));
}

}  // namespace

void HugepagePromoter::note(const void* input, size_t bytes) {
    if (bytes < HugePages::size / 2) return;
    auto entry = std::ranges::find_if(latest_, [&](const Input& i) { return i.data == input && i.bytes == bytes; });
    if (entry == latest_.end()) {
        entry = latest_.begin() + static_cast<std::ptrdiff_t>(oldest_++ % latest_.size());
        *entry = {input, bytes, 0};
    }
    if (++entry->reads < convincing) return;
    entry->reads -= until_next;
    const auto begin = reinterpret_cast<uintptr_t>(input);
    gather(begin, begin + bytes);
}

}  // namespace alltoallv
