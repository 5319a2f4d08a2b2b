// Local sockets that carry messages and descriptors: names, credentials of peers, send and receive.
#pragma once

#include <sys/types.h>

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/base/resources.h"
#include "runtime/base/unique_fd.h"

namespace alltoallv {

/// The largest message. Sockets made here are SOCK_SEQPACKET (with message boundaries), non-blocking and close-on-exec.
inline constexpr size_t max_message_bytes = 32768;

/// Most descriptors in one message (the kernel's SCM_MAX_FD).
inline constexpr size_t max_message_fds = 253;

struct Credentials {
    pid_t pid = 0;  ///< 0 when the process is not visible in our pid namespace
    uid_t uid = 0;
};

/// Returns the process at the other end when the connection was made: the connecting process for an accepted socket,
/// the listening one for a connected one. The kernel guarantees it.
Credentials peer_credentials(int socket);

/// Listens on the abstract name `name` (no file). Returns nothing if the name is taken; throws for other failures.
UniqueFd listen_abstract(const std::string& name);

/// Returns the next pending connection, or nothing if there is none.
UniqueFd accept_connection(int listener);

struct Connection {
    UniqueFd socket;  ///< empty when `error` is set
    int error = 0;    ///< errno of connect: ECONNREFUSED nobody listens, EAGAIN the listener is busy, ...
};

/// Tries once to connect to an abstract name.
Connection connect_abstract(const std::string& name);

/// Returns two connected sockets.
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

/// Receives one message without blocking. Throws if it was truncated, for instance because this process has no
/// descriptor left.
IoStatus try_receive(int socket, Message& message);

}  // namespace alltoallv
