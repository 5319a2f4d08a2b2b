/// \file peer_memory.h
/// \brief The segments of another process's arena, mapped here and shared by all domains.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "runtime/base/mapping.h"
#include "runtime/base/unique_fd.h"

namespace alltoallv {

/// Bytes at the start of a segment that are made resident before a call needs them.
inline constexpr size_t prepared_bytes = size_t{256} << 10;

class PeerMemory {
  public:
    /// Returns the only object for the process `process`; unmapped when the last communicator with it is gone.
    static std::shared_ptr<PeerMemory> of(uint64_t process);

    /// Returns a segment; null until it has been offered. Throws the error of a refusal.
    std::shared_ptr<Mapping> segment(uint32_t id);

    /// Maps the segment of a descriptor that the owner has sent. Returns false if it is not one of a segment. If it
    /// cannot be mapped, those that wait for it, if it is `awaited`, get the error.
    bool offer(uint32_t id, UniqueFd fd, bool awaited);

    /// Reports that a segment will not come to those that wait for it.
    void refuse(uint32_t id, const Error& error);

    /// The owner has released the segment: it is unmapped when nobody here uses it any more.
    void drop(uint32_t id);

    /// Notes that the process has been sent a segment of this process's arena. Returns false if it had been already.
    bool note_given(uint32_t id);

    /// Returns how often `drop` has been called.
    uint64_t drops() const { return drops_.load(std::memory_order_acquire); }

  private:
    struct Segment {
        std::shared_ptr<Mapping> memory;
        std::optional<Error> refusal;
    };

    std::mutex mutex_;
    std::map<uint32_t, Segment> segments_;
    std::set<uint32_t> given_;
    std::atomic<uint64_t> drops_{0};
};

/// The segments of one peer that a communicator has used: found without a lock, and kept as long as it may copy.
class PeerSegments {
  public:
    PeerSegments() = default;
    explicit PeerSegments(std::shared_ptr<PeerMemory> memory) : memory_(std::move(memory)) {}

    /// Call it at the start of an operator, when no copies run: forgets the segments that the owner has released.
    void refresh() {
        if (memory_ == nullptr || seen_ == memory_->drops()) return;
        seen_ = memory_->drops();
        held_.clear();
    }

    /// Returns a segment; null until it has been offered.
    const Mapping* find(uint32_t id);

    /// True if `find` has returned it before.
    bool holds(uint32_t id) const {
        return std::ranges::any_of(held_, [id](const auto& segment) { return segment.first == id; });
    }

  private:
    std::shared_ptr<PeerMemory> memory_;
    uint64_t seen_ = 0;
    std::vector<std::pair<uint32_t, std::shared_ptr<Mapping>>> held_;
};

/// How long a failed call waits for a thread of this process that may be copying from or to its memory.
inline constexpr std::chrono::seconds thread_patience{1};

/// A rank of a communicator, as another one reads and writes its memory.
struct ShmPeer {
    bool same_process = false;
    pid_t pid = 0;
    PeerSegments segments;  // of another process

    /// Reads private memory; returns the number of bytes, or -1 with errno.
    ssize_t read(void* to, uint64_t from, size_t bytes) const {
        const iovec local{to, bytes}, remote{reinterpret_cast<void*>(from), bytes};
        return process_vm_readv(pid, &local, 1, &remote, 1, 0);
    }
};

}  // namespace alltoallv
