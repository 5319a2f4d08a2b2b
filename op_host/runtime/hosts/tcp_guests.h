/// \file tcp_guests.h
/// \brief Connections that have not yet proved that they belong. Those that are silent or send nonsense are dropped.
#pragma once

#include <string>
#include <vector>

#include "runtime/base/processors.h"
#include "runtime/base/sha256.h"
#include "runtime/base/unique_fd.h"

namespace alltoallv {

struct TcpGuest {
    UniqueFd socket;
    Digest challenge{};  ///< random, sent to it first, if there are challenges
    Clock::time_point until;
    std::string heard;
    Clock::time_point came = Clock::now();
};

class TcpGuests {
  public:
    /// `bytes` is the size of the message with which a guest introduces itself.
    TcpGuests(int listener, size_t bytes, bool challenges)
        : listener_(listener), bytes_(bytes), challenges_(challenges) {}

    /// Waits for at most `wait_ms`, never for a single guest; returns those whose message is complete.
    std::vector<TcpGuest> next(int wait_ms);

  private:
    void accept();

    int listener_;
    size_t bytes_;
    bool challenges_;
    std::vector<TcpGuest> guests_;
};

}  // namespace alltoallv
