/// \file peer_memory.h
/// \brief The segments of another process's arena, mapped here when first needed and shared by all domains.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "base/mapping.h"
#include "base/unique_fd.h"

namespace alltoallv {

class PeerMemory {
  public:
    /// The one object for the process named `process`; unmapped when the last communicator with it is gone.
    static std::shared_ptr<PeerMemory> of(uint64_t process);

    /// Address of a segment here; null while it has not been offered. Maps on first use.
    char* base(uint32_t segment);

    /// A descriptor that arrived from the owner.
    void offer(uint32_t segment, UniqueFd fd, size_t bytes);

    size_t mapped() const;

  private:
    struct Segment {
        UniqueFd fd;
        size_t bytes = 0;
        Mapping memory;
    };

    mutable std::mutex mutex_;
    std::map<uint32_t, Segment> segments_;
};

}  // namespace alltoallv
