/// \file tcp_socket.h
/// \brief Connections between hosts: listening, connecting, whole messages. Sockets are close-on-exec.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace alltoallv {

/// Where a rank can be reached. A name or a number, as getaddrinfo takes it.
struct TcpAddress {
    std::string host;
    int port = 0;
};

/// Listens on all interfaces. Empty when the port is taken; 0: a free one. Throws for other failures.
UniqueFd listen_tcp(int port);

int port_of(int listener);

/// The numbers under which this host can be reached, the likeliest first: HCCL_IF_IP, then its interfaces' (those that
/// HCCL_SOCKET_IFNAME names, if any), the loopback last.
std::vector<std::string> own_addresses();

/// Next pending connection, set up for small messages; empty when there is none.
UniqueFd accept_tcp(int listener);

/// Tries each number that the name has, for `seconds` each. Empty when nobody answers.
UniqueFd connect_tcp(const TcpAddress& address, double seconds);

/// False when the other end is gone, or has not taken the bytes within 30 s.
bool send_all(int socket, const void* data, size_t bytes);

/// False when the connection ends, or `deadline` passes, before so many bytes have come.
bool receive_all(int socket, void* data, size_t bytes, std::chrono::steady_clock::time_point deadline);

}  // namespace alltoallv
