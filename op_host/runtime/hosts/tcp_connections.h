/// \file tcp_connections.h
/// \brief Makes connections between all ranks that need one, once a communicator over rank 0 exists.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "runtime/base/unique_fd.h"

namespace alltoallv {

struct TcpConnectionsOptions {
    int rank = 0;
    std::string secret;                   ///< equal on all ranks; proves that a connecting rank belongs to the group
    std::vector<std::vector<int>> peers;  ///< per kind of connection: the ranks to which this one has one
    double timeout = 600.0;               ///< seconds
    std::function<void()> poll;           ///< called about every 10 ms; may throw
    /// Gives every rank the texts of all ranks, which have one length of up to 2 KiB. Collective.
    std::function<std::vector<std::string>(const std::string&)> gather;
};

/// Returns non-blocking sockets, per kind by rank. Collective over the ranks of `gather`. Throws comm_timeout, which
/// names a rank that was not reached.
std::vector<std::vector<UniqueFd>> connect_ranks(const TcpConnectionsOptions& options);

/// Returns "port challenge address address ...", as many addresses as fit into 2 KiB, padded with zeros. The challenge
/// is unpredictable.
std::string card_of(int port);

std::vector<std::string> words_of(const std::string& card);

inline constexpr size_t card_bytes = 2048;

}  // namespace alltoallv
