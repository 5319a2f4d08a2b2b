#include "runtime/shm/arena.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

#include "runtime/base/pages.h"
#include "runtime/shm/links.h"

namespace alltoallv {
namespace {

constexpr size_t megabyte = size_t{1} << 20;
constexpr size_t default_budget = 200 * megabyte;  // until a communicator sets another one
constexpr size_t min_segment = 8 * megabyte;
constexpr size_t max_segment = 64 * megabyte;
constexpr size_t recent_limit = 128 * megabyte;

/// Rounds to whole pages, so that memory within reach of a late writer is cut out without touching another block.
size_t rounded(size_t bytes) {
    return round_up(std::max<size_t>(bytes, 1), page_size());
}

}  // namespace

Block& Block::operator=(Block&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(reserved_, other.reserved_);
    std::swap(arena_, other.arena_);
    return *this;
}

Block::~Block() {
    if (data_ == nullptr) return;
    if (arena_ == nullptr) {
        Arena::instance().give_back_private({data_, reserved_});
    } else if (arena_ == &Arena::instance()) {  // else: inherited through fork, the parent frees it
        arena_->give_back(data_, reserved_);
    }
}

Arena* Arena::make() {
    static std::once_flag once;
    std::call_once(once, [] {
        // A child must not share the parent's free lists or manage its segments.
        pthread_atfork(nullptr, nullptr, [] {
            if (const Arena* parents = current_.load(std::memory_order_relaxed)) {
                parents->close_descriptors();
                current_.store(new Arena(parents), std::memory_order_release);
            }
        });
    });
    auto* fresh = new Arena();  // never destroyed: blocks may outlive every static object
    Arena* expected = nullptr;
    if (current_.compare_exchange_strong(expected, fresh)) return fresh;
    delete fresh;
    return expected;
}

Arena::Arena(const Arena* inherited)
    : inherited_(inherited), quarantine_([this] {
          const Lock lock(*this);
          settle_quarantine();
          release_idle();
          quarantine_.rest();
      }) {
    if (getrandom(&process_, sizeof process_, 0) != sizeof process_) process_ = static_cast<uint64_t>(getpid());
    const char* pool = std::getenv("ALLTOALLV_POOL");
    enabled_ = pool == nullptr || std::string(pool) != "0";
}

Block Arena::allocate(size_t bytes) {
    Block block;
    block.bytes_ = bytes;
    block.reserved_ = rounded(bytes);
    if (enabled_) {
        const std::lock_guard lock(mutex_);
        block.data_ = take(block.reserved_);
        if (block.data_ != nullptr) {
            block.arena_ = this;
            return block;
        }
    }
    {
        const std::lock_guard lock(mutex_);
        const auto [data, reserved] = private_.take(block.reserved_);
        block.data_ = data;
        block.reserved_ = reserved;
    }
    if (block.data_ == nullptr)
        throw resource_error(5024, "no memory for an output of " + std::to_string(bytes) + " bytes");
    private_blocks_.fetch_add(1, std::memory_order_relaxed);
    private_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    return block;
}

void Arena::give_back_private(PrivateBlocks::Memory memory) {
    const std::lock_guard lock(mutex_);
    private_.give_back(memory, communicators_ > 0);
}

char* Arena::take(size_t bytes) {
    settle_quarantine();
    for (size_t i = recent_.size(); i-- > 0;) {
        if (recent_[i].bytes != bytes) continue;
        char* data = recent_[i].data;
        recent_.erase(recent_.begin() + static_cast<ptrdiff_t>(i));
        return data;
    }
    for (const auto& segment : segments_)
        if (char* data = take_from(*segment, bytes)) return data;
    while (!recent_.empty()) {  // make the kept blocks divisible before requesting more memory
        merge(recent_.back().data, recent_.back().bytes);
        recent_.pop_back();
    }
    for (const auto& segment : segments_)
        if (char* data = take_from(*segment, bytes)) return data;
    return grow(bytes) ? take_from(*segments_.back(), bytes) : nullptr;
}

char* Arena::take_from(Segment& segment, size_t bytes) {
    auto best = segment.free.end();
    for (auto it = segment.free.begin(); it != segment.free.end(); ++it)
        if (it->second >= bytes && (best == segment.free.end() || it->second < best->second)) best = it;
    if (best == segment.free.end()) return nullptr;
    const size_t offset = best->first, left = best->second - bytes;
    segment.free.erase(best);
    if (left > 0) segment.free.emplace(offset + bytes, left);
    segment.used += bytes;
    segment.memory.populate(offset, bytes, true);
    return segment.memory.data() + offset;
}

/// Ids have 16 bits: the ids of segments released long ago are used again.
uint32_t Arena::free_id() {
    for (;;) {
        const uint32_t id = next_id_;
        next_id_ = id == 0xffff ? 1 : id + 1;
        if (std::ranges::none_of(segments_, [id](const auto& segment) { return segment->id == id; })) return id;
    }
}

bool Arena::grow(size_t bytes) {
    const size_t limit = communicators_ == 0 ? default_budget : budget_;
    size_t size = round_up(std::max({bytes, min_segment, std::min(total_, max_segment)}), 2 * megabyte);
    if (total_ + size > limit) size = round_up(bytes, page_size());
    if (total_ + size > limit || segments_.size() == max_segments) return false;
    auto segment = std::make_unique<Segment>();
    segment->id = free_id();
    segment->fd = UniqueFd(memfd_create("alltoallv-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!segment->fd || ftruncate(segment->fd.get(), static_cast<off_t>(size)) != 0) return false;
    // Sealed, so that no peer can shrink it while another one uses it.
    if (fcntl(segment->fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return false;
    try {
        segment->memory = Mapping(segment->fd.get(), size);
    } catch (const Error&) {
        return false;  // out of memory: a private block may still be possible
    }
    segment->free.emplace(0, size);
    for (size_t i = 0; i < max_segments; ++i) {
        Span& span = spans_[i];
        if (span.id.load(std::memory_order_relaxed) != 0) continue;
        span.base.store(reinterpret_cast<uint64_t>(segment->memory.data()), std::memory_order_release);
        span.bytes.store(size, std::memory_order_release);
        span.fd.store(segment->fd.get(), std::memory_order_relaxed);
        span.id.store(segment->id, std::memory_order_release);
        spans_in_use_.store(std::max(spans_in_use_.load(std::memory_order_relaxed), i + 1), std::memory_order_release);
        break;
    }
    total_ += size;
    segments_.push_back(std::move(segment));
    return true;
}

uint32_t Arena::first_segment() {
    const std::lock_guard lock(mutex_);
    if (segments_.empty()) {
        if (!enabled_ || budget_ < min_segment || !grow(1)) return 0;
        segments_.front()->memory.populate(0, prepared_bytes, true);
    }
    return segments_.front()->id;
}

Arena::Lock::~Lock() {
    const std::vector<uint32_t> released = std::exchange(arena_.released_, {});
    lock_.unlock();
    if (!released.empty()) Links::announce_released(released);
}

void Arena::give_back(char* data, size_t bytes) {
    const Lock lock(*this);
    settle_quarantine();
    if (!usable(data, bytes)) {
        parked_.push_back({data, bytes});
        return;
    }
    size_t kept = bytes;
    for (const Parked& block : recent_) kept += block.bytes;
    if (recent_.size() < max_recent && kept <= recent_limit && communicators_ > 0) {
        recent_.push_back({data, bytes});
        return;
    }
    merge(data, bytes);
    release_idle();
}

void Arena::merge(char* data, size_t bytes) {
    for (const auto& segment : segments_) {
        char* base = segment->memory.data();
        if (data < base || data >= base + segment->memory.size()) continue;
        auto [it, inserted] = segment->free.emplace(static_cast<size_t>(data - base), bytes);
        segment->used -= bytes;
        if (auto next = std::next(it); next != segment->free.end() && it->first + it->second == next->first) {
            it->second += next->second;
            segment->free.erase(next);
        }
        if (it != segment->free.begin()) {
            if (auto before = std::prev(it); before->first + before->second == it->first) {
                before->second += it->second;
                segment->free.erase(it);
            }
        }
        return;
    }
}

Location Arena::locate(const void* data, size_t bytes) const {
    const auto address = reinterpret_cast<uint64_t>(data);
    if (has_cuts() && is_cut(data, bytes)) return Location::in_private(data);
    for (const Span& span : spans()) {
        const auto [id, base, size] = span.read();
        if (id != 0 && address >= base && address - base + bytes <= size)
            return Location::in_segment(id, address - base);
    }
    return Location::in_private(data);
}

char* Arena::address(uint32_t segment, uint64_t offset, size_t bytes) const {
    for (const Span& span : spans()) {
        const auto [id, base, size] = span.read();
        if (segment == 0 || id != segment) continue;
        if (offset > size || bytes > size - offset) return nullptr;
        return reinterpret_cast<char*>(base) + offset;
    }
    return nullptr;
}

int Arena::descriptor(uint32_t id) const {
    const std::lock_guard lock(mutex_);
    for (const auto& segment : segments_)
        if (segment->id == id) return segment->fd.get();
    return -1;
}

// Works without the mutex, which another thread may have held at the moment of the fork.
void Arena::close_descriptors() const {
    for (const Span& span : spans())
        if (span.id.load(std::memory_order_acquire) != 0) ::close(span.fd.load(std::memory_order_relaxed));
}

void Arena::add_budget(size_t bytes) {
    const std::lock_guard lock(mutex_);
    ++communicators_;
    budget_ += bytes;
}

void Arena::remove_budget(size_t bytes) {
    const Lock lock(*this);
    --communicators_;
    budget_ -= bytes;
    if (communicators_ == 0) private_.clear();
    settle_quarantine();
    if (total_ <= limit()) return;
    for (const Parked& block : recent_) merge(block.data, block.bytes);
    recent_.clear();
    release_idle();
}

void Arena::release_idle() {
    std::erase_if(segments_, [&](const auto& segment) {
        if (segment->used > 0 || total_ <= limit()) return false;
        for (Span& span : spans_)
            if (span.id.load(std::memory_order_relaxed) == segment->id) span.id.store(0, std::memory_order_release);
        total_ -= segment->memory.size();
        released_.push_back(segment->id);
        return true;
    });
}

void Arena::quarantine(const void* begin, size_t bytes, std::function<bool()> clear) {
    const std::lock_guard lock(mutex_);
    const auto* data = static_cast<const char*>(begin);
    if (!quarantine_.add(data, bytes, std::move(clear))) return;
    for (const auto& segment : segments_) {
        char* const base = segment->memory.data();
        if (data < base || data >= base + segment->memory.size()) continue;
        (void)cuts_.cut(segment->fd.get(), base, data, bytes);  // without memory for it, it is only quarantined
        has_cuts_.store(true, std::memory_order_release);
    }
}

bool Arena::is_cut(const void* data, size_t bytes) const {
    const std::lock_guard lock(mutex_);
    return cuts_.overlaps(static_cast<const char*>(data), bytes);
}

/// True if a freed block can be used again.
bool Arena::usable(const char* data, size_t bytes) {
    if (quarantine_.covers(data, bytes)) return false;
    if (!has_cuts()) return true;
    const bool mended = cuts_.mend(data, bytes);
    has_cuts_.store(cuts_.bytes() > 0, std::memory_order_release);
    return mended;
}

/// Also tries again what is clear, but could not be mended for lack of memory.
void Arena::settle_quarantine() {
    quarantine_.settle();
    std::erase_if(parked_, [&](const Parked& block) {
        if (!usable(block.data, block.bytes)) return false;
        merge(block.data, block.bytes);
        return true;
    });
}

ArenaStats Arena::stats() {
    const std::lock_guard lock(mutex_);
    settle_quarantine();
    ArenaStats stats{segments_.size(),
                     total_,
                     0,
                     0,
                     private_blocks_.load(std::memory_order_relaxed),
                     private_bytes_.load(std::memory_order_relaxed),
                     cuts_.bytes()};
    for (const auto& segment : segments_) stats.used_bytes += segment->used;
    for (const Parked& block : recent_) stats.used_bytes -= block.bytes;
    for (const Parked& block : parked_) stats.quarantined_bytes += block.bytes;
    return stats;
}

}  // namespace alltoallv
