/// \file tcp_socket.h
/// \brief Connections between hosts: listening, connecting, whole messages. Sockets are close-on-exec.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "runtime/base/processors.h"
#include "runtime/base/unique_fd.h"

namespace alltoallv {

/// The address of a rank: a name or a number, as getaddrinfo takes it.
struct TcpAddress {
    std::string host;
    int port = 0;
};

/// Listens on all interfaces. Returns nothing if the port is taken; port 0 means a free one. Throws for other failures.
UniqueFd listen_tcp(int port);

int port_of(int listener);

/// Returns the numbers under which this host can be reached, the likeliest first: HCCL_IF_IP, then the addresses of its
/// interfaces (those that HCCL_SOCKET_IFNAME names, if any), the loopback last.
std::vector<std::string> own_addresses();

/// Returns the next pending connection, set up for small messages; nothing if there is none.
UniqueFd accept_tcp(int listener);

/// Tries each number that the name has, for `seconds` each. Returns nothing if nobody answers.
UniqueFd connect_tcp(const TcpAddress& address, double seconds);

/// Returns false if the other end is gone, or has not taken the bytes within 30 s.
bool send_all(int socket, const void* data, size_t bytes);

/// Returns false if the connection ends, or `deadline` passes, before all bytes have arrived.
bool receive_all(int socket, void* data, size_t bytes, Clock::time_point deadline);

}  // namespace alltoallv
