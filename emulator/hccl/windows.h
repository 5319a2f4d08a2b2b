// The buffers of a communicator as kernels see them: each rank's own, and its peers' mapped into this process.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/base/mapping.h"
#include "runtime/base/unique_fd.h"
#include "runtime/core/communicator.h"

namespace alltoallv::emulator {

class Windows {
  public:
    /// This rank's buffer, in memory that other processes can map. Its first MiB is filled with 0xA5, since a device
    /// promises no zeros, and flags must not be found by chance. Throws Failure.
    Windows(int rank, int size, int device, uint64_t bytes);
    ~Windows();
    Windows(const Windows&) = delete;
    Windows& operator=(const Windows&) = delete;

    /// Maps the peers' buffers; all ranks call it, over a communicator of their own. Throws Failure or Error.
    void connect(Communicator& core);
    bool connected() const { return connected_; }

    uint64_t bytes() const { return bytes_; }

    /// Returns the address of a rank's buffer in this process; null for a peer's before `connect`.
    void* of(int rank) const { return buffers_[static_cast<size_t>(rank)].data(); }

  private:
    void add(int rank, int fd);

    const int rank_, device_;
    const uint64_t bytes_;
    UniqueFd memory_;
    std::vector<Mapping> buffers_;
    bool connected_ = false;
};

}  // namespace alltoallv::emulator
