/// \file tcp_join.h
/// \brief How ranks on several hosts find each other: rank 0 listens, every other rank connects to it once.
///
/// Both sides prove, by an HMAC over the other's random challenge, that they know the key, which is never sent. Later
/// messages are neither encrypted nor signed.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/base/error.h"
#include "runtime/base/unique_fd.h"
#include "runtime/hosts/tcp_socket.h"

namespace alltoallv {

struct TcpJoinOptions {
    int rank = 0;
    int size = 1;
    std::string domain;
    bool check = true;             ///< equal on all ranks
    std::string key;               ///< equal on all ranks of a communicator, different for others; made from the secret
    double timeout = 600.0;        ///< seconds
    double warn_after = 10.0;      ///< seconds until a warning names who is absent
    std::function<void()> poll;    ///< called about every 50 ms; may throw
    std::optional<Error> failure;  ///< told to the other ranks instead of joining
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

/// Makes rank 0's part. Throws comm_timeout, which names the absent ranks, on all ranks that have arrived; on all that
/// come within 10 s, what keeps this rank or another from joining.
TcpMembership receive_ranks(UniqueFd listener, const TcpJoinOptions& options);

/// Makes it where the others look for rank 0; waits while another communicator uses the port. If another process is
/// rank 0 there, both throw an error that names both.
TcpMembership receive_ranks_at(const TcpAddress& address, const TcpJoinOptions& options);

/// Makes every other rank's part: tries the addresses in turn until one of them is rank 0.
TcpMembership join_rank_0(const std::vector<TcpAddress>& addresses, const TcpJoinOptions& options);

/// Ends the meeting with what this rank has come to since: all ranks return, or all throw, the error of a rank that has
/// failed.
void confirm(const TcpMembership& membership, TcpJoinOptions options, const std::optional<Error>& failure);

}  // namespace alltoallv
