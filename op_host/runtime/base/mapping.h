// A shared mapping of a memfd, unmapped on destruction.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "runtime/base/huge_pages.h"
#include "runtime/base/pages.h"
#include "runtime/base/resources.h"
#include "runtime/base/sizes.h"

namespace alltoallv {

class Mapping {
  public:
    Mapping() = default;
    Mapping(int fd, size_t bytes) : bytes_(bytes) {
        void* place = aligned_place(bytes);
        const int flags = MAP_SHARED | (place == nullptr ? 0 : MAP_FIXED);
        data_ = mmap(place, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
        if (data_ != MAP_FAILED) {
            resident_ = std::make_unique<std::atomic<bool>[]>((bytes + block - 1) / block);
            return;
        }
        const int number = errno;
        data_ = nullptr;  // do not unmap: by now the address may belong to another thread's mapping
        throw system_error("mapping " + std::to_string(bytes) + " bytes of memory failed", number);
    }
    Mapping(Mapping&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)),
          bytes_(std::exchange(other.bytes_, 0)),
          resident_(std::move(other.resident_)),
          gathers_(other.gathers_.load()) {}
    Mapping& operator=(Mapping&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        std::swap(resident_, other.resident_);
        gathers_ = other.gathers_.exchange(gathers_);
        return *this;
    }
    ~Mapping() {
        if (data_ != nullptr) munmap(data_, bytes_);
    }

    char* data() const { return static_cast<char*>(data_); }
    size_t size() const { return bytes_; }

    /// Returns the address of `bytes` at `offset`; null unless all of them lie in the mapping.
    char* at(uint64_t offset, uint64_t bytes) const {
        return offset <= bytes_ && bytes <= bytes_ - offset ? data() + offset : nullptr;
    }

    /// Makes a part resident, and a little around it, once: a page fault inside an exchange costs more than the
    /// exchange. `gathers`: large parts come into huge pages if they are available, which takes half the time, unless
    /// the kernel has to make them first: then it takes at most as long as page by page. Who maps them later finds them
    /// so. Thread-safe.
    void populate(size_t offset, size_t bytes, bool gathers = false) const {
        if (data_ == nullptr || bytes == 0) return;
        const size_t end = std::min(offset + bytes, bytes_);
        if (gathers) gather(offset, end);
        for (size_t i = offset / block; i <= (end - 1) / block; ++i) {
            if (resident_[i].exchange(true, std::memory_order_relaxed)) continue;
            populate_pages(i * block, std::min(block, bytes_ - i * block), gathers);
        }
    }

    /// Makes the pages of a part resident, as they are. `fresh`: there is no memory yet. Memory that there is comes
    /// many pages at a time if it is asked for as if to read, and may be written as well.
    void populate_pages(size_t offset, size_t bytes, bool fresh = true) const {
        constexpr int populate_read = 22, populate_write = 23;  // Linux 5.14; older kernels fault lazily
        const size_t begin = offset / page_size() * page_size();
        (void)madvise(data() + begin, offset + bytes - begin, fresh ? populate_write : populate_read);
    }

  private:
    /// Reserves addresses that begin at a huge page, or for less memory at a page, for a mapping to replace; null if
    /// there are none or any will do.
    static void* aligned_place(size_t bytes) {
        const size_t unit = bytes < HugePages::size ? page_size() : HugePages::size;
        if (unit == static_cast<size_t>(sysconf(_SC_PAGESIZE))) return nullptr;
        const size_t kept = round_up(bytes, page_size()), reserved = kept + unit;
        void* place = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (place == MAP_FAILED) return nullptr;
        const size_t before = (unit - reinterpret_cast<uintptr_t>(place) % unit) % unit;
        char* begin = static_cast<char*>(place) + before;
        if (before > 0) munmap(place, before);
        if (before < unit) munmap(begin + kept, unit - before);
        return begin;
    }

    /// Moves the huge pages of which at least half lies in `[offset, end)`: one, then twice as many at a time, as long
    /// as the kernel has some without long work.
    void gather(size_t offset, size_t end) const {
        constexpr size_t huge = HugePages::size, half = huge / 2;
        size_t begin = offset / huge * huge, last = end / huge * huge;
        if (std::min(begin + huge, end) - offset < half) begin += huge;
        if (end - last >= half && last + huge <= bytes_) last += huge;
        HugePages pages;
        for (size_t count = 1; begin < last && gathers_.load(std::memory_order_relaxed); count *= 2) {
            const size_t stop = std::min(last, begin + count * huge);
            std::atomic<bool>* const from = &resident_[begin / block];
            std::atomic<bool>* const to = from + (stop - begin) / block;
            if (!std::all_of(from, to, [](const auto& is) { return is.load(std::memory_order_relaxed); })) {
                (void)madvise(data() + begin, stop - begin, MADV_HUGEPAGE);
                // In the caller's part: the rest may be another thread's.
                for (size_t at = begin; at < stop; at += huge)
                    (void)*static_cast<const volatile char*>(data() + std::max(at, offset));
                if (!pages.worthwhile() || !pages.gather(data() + begin, (stop - begin) / huge))
                    return gathers_.store(false, std::memory_order_relaxed);
                for (auto* is = from; is != to; ++is) is->store(true, std::memory_order_relaxed);
            }
            begin = stop;
        }
    }

    static constexpr size_t block = size_t{64} << 10;  // that is made resident at once

    void* data_ = nullptr;
    size_t bytes_ = 0;
    std::unique_ptr<std::atomic<bool>[]> resident_;  // per block
    mutable std::atomic<bool> gathers_{true};  // false once the kernel has had no huge page, or only after long work
};

}  // namespace alltoallv
