// What the root's and the peers' half of the bootstrap of processes share.
#pragma once

#include <sys/types.h>

#include <string>

#include "base/unique_fd.h"
#include "bootstrap/bootstrap.h"

namespace alltoallv {

/// Names that the root tries in turn. Another user may hold some of them, but is never spoken to.
inline constexpr int name_attempts = 16;

/// Name number `attempt` of the options' domain: a hash of user id, job, domain and attempt, keyed by the job's secret.
std::string socket_name(const BootstrapOptions& options, int attempt);

/// What a name begins with that the root makes up when all of those are held by others: peers look it up in the
/// kernel's list of sockets.
std::string found_name_prefix(const BootstrapOptions& options);

/// Empty where the kernel refuses; sockets then tell alone that a peer has ended.
UniqueFd open_pidfd(pid_t pid);

/// True when the process behind `pidfd` has ended.
bool has_ended(const UniqueFd& pidfd);

/// False when the process that a socket's credentials name is gone: a child that it forked may still hold the socket.
bool is_alive(pid_t pid, const UniqueFd& pidfd);

/// Rank 0: opens the domain, admits everybody, hands out what they need.
Membership open_domain(const BootstrapOptions& options);

/// Every other rank.
Membership join_domain(const BootstrapOptions& options);

}  // namespace alltoallv
