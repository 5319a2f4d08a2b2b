// Local sockets that carry messages and descriptors: names, peers' credentials, send and receive.
#pragma once

#include <sys/types.h>

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/resources.h"
#include "base/unique_fd.h"

namespace alltoallv {

/// Every socket made here is SOCK_SEQPACKET (message boundaries are kept), non-blocking and close-on-exec.
inline constexpr size_t max_message_bytes = 32768;

/// Descriptors that one message can carry (the kernel's SCM_MAX_FD).
inline constexpr size_t max_message_fds = 253;

struct Credentials {
    pid_t pid = 0;  ///< 0 when the process is not visible in our pid namespace
    uid_t uid = 0;
};

/// Who was at the other end when the connection was made: the connecting process for an accepted socket, the
/// listening process for a connected one. The kernel vouches for it.
Credentials peer_credentials(int socket);

/// Listens on the abstract name `name` (no file). Empty when the name is taken; throws for other failures.
UniqueFd listen_abstract(const std::string& name);

/// Next pending connection, empty when there is none.
UniqueFd accept_connection(int listener);

struct Connection {
    UniqueFd socket;  ///< empty when `error` is set
    int error = 0;    ///< errno of connect: ECONNREFUSED nobody listens, EAGAIN the listener is busy, ...
};

/// Tries once to connect to an abstract name.
Connection connect_abstract(const std::string& name);

/// Two connected sockets.
std::pair<UniqueFd, UniqueFd> socket_pair();

enum class IoStatus {
    done,
    again,   ///< would block; also when too many descriptors of this user are in flight
    closed,  ///< the other end is gone
};

/// Sends one non-empty message without blocking. The descriptors are duplicated into it, the caller keeps its own.
IoStatus try_send(int socket, std::string_view data, std::span<const int> fds = {});

struct Message {
    std::string data;
    std::vector<UniqueFd> fds;
};

/// Receives one message without blocking. Throws when it was cut short, for instance because this process has no
/// descriptor left.
IoStatus try_receive(int socket, Message& message);

}  // namespace alltoallv
