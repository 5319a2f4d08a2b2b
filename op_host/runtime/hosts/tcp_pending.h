/// \file tcp_pending.h
/// \brief Connections that have not yet proved that they belong. Those that are silent, or send anything else, are
/// dropped.
#pragma once

#include <string>
#include <vector>

#include "runtime/base/processors.h"
#include "runtime/base/sha256.h"
#include "runtime/base/unique_fd.h"

namespace alltoallv {

struct PendingConnection {
    UniqueFd socket;
    Digest challenge{};  ///< random, sent to it first, if there are challenges
    Clock::time_point until;
    std::string rx_buffer;
    Clock::time_point accepted_at = Clock::now();
};

class PendingConnections {
  public:
    /// `bytes` is the size of the message with which a connection introduces itself.
    PendingConnections(int listener, size_t bytes, bool challenges)
        : listener_(listener), bytes_(bytes), challenges_(challenges) {}

    /// Waits for at most `wait_ms`, never for a single connection; returns those whose message is complete.
    std::vector<PendingConnection> next(int wait_ms);

  private:
    void accept();

    int listener_;
    size_t bytes_;
    bool challenges_;
    std::vector<PendingConnection> pending_;
};

}  // namespace alltoallv
