#include "runtime/shm/private_blocks.h"

#include <sys/mman.h>

#include <cstdlib>
#include <utility>

#include "runtime/base/sizes.h"

namespace alltoallv {
namespace {

constexpr size_t huge_page = size_t{2} << 20;
constexpr size_t most_kept = size_t{512} << 20;

}  // namespace

PrivateBlocks::Memory PrivateBlocks::take(size_t bytes) {
    const size_t aligned = bytes < huge_page ? 2 * cache_line : huge_page, size = round_up(bytes, aligned);
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it)
        if (it->bytes >= size && it->bytes / 2 <= size && (best == kept_.end() || it->bytes < best->bytes)) best = it;
    if (best != kept_.end()) {
        const Memory memory = *best;
        kept_.erase(best);
        return memory;
    }
    auto* data = static_cast<char*>(std::aligned_alloc(aligned, size));
    // Touching fresh pages of 4 KiB takes longer than an exchange; if the kernel refuses, they stay as they are.
    if (data != nullptr && aligned == huge_page) (void)madvise(data, size, MADV_HUGEPAGE);
    return {data, size};
}

void PrivateBlocks::give_back(Memory memory, bool keeps) {
#ifdef MADV_FREE
    if (keeps && memory.bytes >= huge_page && madvise(memory.data, memory.bytes, MADV_FREE) == 0) {
        kept_.push_back(std::exchange(memory, {}));
        size_t total = 0;
        for (const Memory& each : kept_) total += each.bytes;
        while (total > most_kept) {
            total -= kept_.front().bytes;
            std::free(kept_.front().data);
            kept_.erase(kept_.begin());
        }
    }
#endif
    std::free(memory.data);
}

void PrivateBlocks::clear() {
    for (const Memory& memory : kept_) std::free(memory.data);
    kept_.clear();
}

}  // namespace alltoallv
