/// \file tcp_meeting.h
/// \brief How ranks on several hosts find each other: rank 0 listens, every other rank connects to it once.
///
/// Both sides prove, by an HMAC over the other's random challenge, that they know the key, which is never sent. Later
/// messages are neither encrypted nor signed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "transport/tcp/tcp_socket.h"

namespace alltoallv {

struct TcpMeetingOptions {
    int rank = 0;
    int size = 1;
    std::string domain;
    std::string key;             ///< equal on all ranks of a communicator, different for others; made from the secret
    double timeout = 600.0;      ///< seconds
    std::function<void()> poll;  ///< called about every 50 ms; may throw
};

/// A rank as the other ranks see it.
struct TcpPeer {
    uint32_t pid = 0;
    uint32_t place = 0;  ///< a hash of its host
    bool same_host = false;
    int first_on_host = 0;  ///< the lowest rank on its host
    std::string host;       ///< its name
};

struct TcpMembership {
    std::vector<UniqueFd> sockets;  ///< by rank, where there is one: rank 0 has one to every rank, others one to rank 0
    std::vector<TcpPeer> peers;     ///< by rank
};

/// Makes rank 0's part. Throws comm_timeout, which names the absent ranks, on all ranks that have arrived.
TcpMembership receive_ranks(const UniqueFd& listener, const TcpMeetingOptions& options);

/// Makes every other rank's part: tries the addresses in turn until one of them is rank 0.
TcpMembership join_rank_0(const std::vector<TcpAddress>& addresses, const TcpMeetingOptions& options);

/// Listens on `port`, and waits while another communicator uses it.
UniqueFd listen_when_free(int port, const TcpMeetingOptions& options);

}  // namespace alltoallv
