// What a communicator has launched and the device may not have finished.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transport/hccl/hccl_group.h"

namespace alltoallv {

/// Destroying them without `release` leaks their events.
class Launches {
  public:
    /// HCCL runs the calls of a communicator in their order, on every rank alike: `stream` waits for the one before.
    void follow_last(aclrtStream stream, const std::string& where);
    /// Another one on `stream`. HCCL may read the counts when the device comes to the call, not when it is made.
    void add(std::unique_ptr<WireLayout> layout, aclrtStream stream, const std::string& where);
    /// Lets go of what the device has finished. True: that was all.
    bool forget_completed(const std::string& where);
    /// What has not finished keeps its memory for ever, since HCCL may still read it.
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
