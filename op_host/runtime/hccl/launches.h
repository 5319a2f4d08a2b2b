// The calls that a communicator has launched and that the device may not have finished.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "runtime/hccl/hccl_group.h"

namespace alltoallv {

/// Destroying them without `release` leaks their events.
class Launches {
  public:
    /// HCCL runs the calls of a communicator in the same order on every rank, so the stream waits for the call before.
    void follow_last(const OnStream& on);
    /// Adds a call. HCCL may read the counts when the device reaches the call, not when it is made.
    void add(std::unique_ptr<WireLayout> layout, const OnStream& on);
    /// Releases the calls that the device has finished. Returns true if none is left.
    bool forget_completed(const std::string& where);
    /// Keeps the memory of unfinished calls for ever, because HCCL may still read it.
    void release();

  private:
    struct Launch {
        aclrtEvent event;
        aclrtStream stream;
        std::unique_ptr<WireLayout> layout;
    };
    std::deque<Launch> launched_;
    std::vector<aclrtEvent> free_;
};

}  // namespace alltoallv
