// The windows of a communicator of HCCL: memory of every rank that the kernels of its peers can reach.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/abi/hccl_windows.h"

namespace alltoallv {

class DeviceWindows {
  public:
    /// Makes a communicator of the same ranks, since HCCL's own collectives use the buffer of theirs, links its
    /// windows, and zeroes the first `zeroed` bytes. All ranks of `parent` call it, in the same order as other calls.
    /// Throws backend_unavailable, on every rank, if this HCCL or this topology has no windows; `HcclError` where a
    /// call fails.
    DeviceWindows(HcclComm parent, uint64_t zeroed);
    ~DeviceWindows();
    DeviceWindows(const DeviceWindows&) = delete;
    DeviceWindows& operator=(const DeviceWindows&) = delete;

    uint32_t rank() const { return rank_; }
    uint32_t size() const { return static_cast<uint32_t>(addresses_.size()); }

    /// Bytes of the smallest window.
    uint64_t bytes() const { return bytes_; }

    /// One per rank, on this device.
    const std::vector<void*>& addresses() const { return addresses_; }

  private:
    void link();

    HcclComm comm_ = nullptr;
    uint32_t rank_ = 0;
    uint64_t bytes_ = 0;
    std::vector<void*> addresses_;
};

}  // namespace alltoallv
