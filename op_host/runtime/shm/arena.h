/// \file arena.h
/// \brief The process's pool of shared memory that peers can write to: outputs, `alltoallv.empty()`.
///
/// Segments are memfds that only their owner allocates from, made resident when created (fresh pages cost more than an
/// exchange) and mapped by peers when they first need them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "runtime/base/mapping.h"
#include "runtime/base/unique_fd.h"
#include "runtime/control/layout.h"
#include "runtime/shm/cut_pages.h"
#include "runtime/shm/private_blocks.h"
#include "runtime/shm/quarantine.h"

namespace alltoallv {

class Arena;

/// Memory of one output. Returns to the arena when destroyed; a private block is ordinary memory of this process.
class Block {
  public:
    Block() = default;
    Block(Block&& other) noexcept { *this = std::move(other); }
    Block& operator=(Block&& other) noexcept;
    ~Block();

    char* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    bool shared() const { return arena_ != nullptr; }

  private:
    friend class Arena;
    char* data_ = nullptr;
    size_t bytes_ = 0;
    size_t reserved_ = 0;
    Arena* arena_ = nullptr;  // null for a private block
};

struct ArenaStats {
    uint64_t segments, segment_bytes, used_bytes, quarantined_bytes, private_blocks, private_bytes, cut_bytes;
};

class Arena {
  public:
    /// Returns the arena of this process; a forked child has its own.
    static Arena& instance() {
        Arena* const arena = current_.load(std::memory_order_acquire);
        return arena != nullptr ? *arena : *make();
    }

    /// Random number by which peers identify this process.
    uint64_t process() const { return process_; }

    /// Never fails for lack of budget: a block beyond it is private, and counted.
    Block allocate(size_t bytes);

    /// Returns the location of `[data, data + bytes)` for peers; pages that have been cut out of the arena are private.
    Location locate(const void* data, size_t bytes) const;

    /// Returns the address of `bytes` at an offset of a segment of this process; null unless all of them lie in it.
    char* address(uint32_t segment, uint64_t offset, size_t bytes) const;

    /// Returns the id of a segment, which is made and partly resident if there is none; 0 if there cannot be one of the
    /// usual size.
    uint32_t first_segment();

    /// Returns the descriptor of a segment for a peer; -1 if there is none.
    int descriptor(uint32_t segment) const;

    /// A communicator adds its domain's budget while it lives. Idle segments beyond the budgets are freed.
    void add_budget(size_t bytes);
    void remove_budget(size_t bytes);

    /// Unless `clear()` is true: gives this process private pages at these addresses, where peers can no longer write,
    /// and does not reuse the block until `clear()` is true.
    void quarantine(const void* data, size_t bytes, std::function<bool()> clear);

    /// True if there are private pages in place of shared ones.
    bool has_cuts() const { return has_cuts_.load(std::memory_order_acquire); }

    ArenaStats stats();

    /// Called in a forked child on the parent's arena: its descriptors would keep the segments from being freed.
    void close_descriptors() const;

    /// `inherited` is the parent's arena in a forked child; it is never destroyed.
    explicit Arena(const Arena* inherited = nullptr);

  private:
    friend class Block;

    struct Segment {
        uint32_t id;
        UniqueFd fd;
        Mapping memory;
        size_t used = 0;
        std::map<size_t, size_t> free;  // offset -> bytes, neighbours merged
    };
    struct Span {
        struct Words {
            uint32_t id;
            uint64_t base, bytes;
        };

        std::atomic<uint64_t> base{0}, bytes{0};
        std::atomic<uint32_t> id{0};
        std::atomic<int> fd{-1};

        /// Returns what belongs together, also while another segment takes the slot.
        Words read() const {
            for (;;) {
                const uint32_t first = id.load(std::memory_order_acquire);
                const Words words{first, base.load(std::memory_order_acquire), bytes.load(std::memory_order_acquire)};
                if (id.load(std::memory_order_relaxed) == first) return words;
            }
        }
    };
    struct Parked {
        char* data;
        size_t bytes;
    };

    /// Holds the mutex; after unlocking it informs the peers of segments released meanwhile.
    class Lock {
      public:
        explicit Lock(Arena& arena) : arena_(arena), lock_(arena.mutex_) {}
        ~Lock();
        Lock(const Lock&) = delete;
        Lock& operator=(const Lock&) = delete;

      private:
        Arena& arena_;
        std::unique_lock<std::mutex> lock_;
    };

    static Arena* make();
    std::span<const Span> spans() const { return {spans_.data(), spans_in_use_.load(std::memory_order_acquire)}; }
    char* take(size_t bytes);
    char* take_from(Segment& segment, size_t bytes);
    bool grow(size_t bytes);
    uint32_t free_id();
    void give_back(char* data, size_t bytes);
    void give_back_private(PrivateBlocks::Memory memory);
    void merge(char* data, size_t bytes);
    void settle_quarantine();
    bool is_cut(const void* data, size_t bytes) const;
    bool usable(const char* data, size_t bytes);
    size_t limit() const { return communicators_ == 0 ? 0 : budget_; }  // most memory that stays unused
    void release_idle();

    static constexpr size_t max_segments = 64;
    static constexpr size_t max_recent = 32;

    static inline constinit std::atomic<Arena*> current_{nullptr};

    mutable std::mutex mutex_;
    uint64_t process_;
    [[maybe_unused]] const Arena* inherited_;  // kept reachable
    bool enabled_;
    uint32_t next_id_ = 1;
    size_t communicators_ = 0;
    size_t budget_ = 0;
    size_t total_ = 0;
    std::vector<std::unique_ptr<Segment>> segments_;
    std::vector<uint32_t> released_;  // segments whose release has not been announced to peers
    std::vector<Parked> recent_;      // freed blocks kept whole for the next request of that size
    std::vector<Parked> parked_;      // freed but quarantined
    PrivateBlocks private_;
    Quarantine quarantine_;
    CutPages cuts_;
    std::atomic<bool> has_cuts_{false};
    std::array<Span, max_segments> spans_;  // the segments again, for lookups without the lock
    std::atomic<size_t> spans_in_use_{0};   // one past the highest slot ever taken
    std::atomic<uint64_t> private_blocks_{0}, private_bytes_{0};
};

/// The budget of a communicator that uses the arena for its outputs alone, while it lives.
class ArenaBudget {
  public:
    ArenaBudget(Arena& arena, size_t bytes) : arena_(arena), bytes_(bytes) { arena_.add_budget(bytes_); }
    ArenaBudget(const ArenaBudget&) = delete;
    ArenaBudget& operator=(const ArenaBudget&) = delete;
    ~ArenaBudget() {
        if (&Arena::instance() == &arena_) arena_.remove_budget(bytes_);  // else: in a forked child
    }

  private:
    Arena& arena_;
    size_t bytes_;
};

}  // namespace alltoallv
