// Functions that the root's and the peers' half of the bootstrap of processes share.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>

#include "runtime/base/unique_fd.h"
#include "runtime/bootstrap/bootstrap.h"

namespace alltoallv {

/// Number of names that the root tries in turn. Another user may hold some of them, but nothing is sent to that user.
inline constexpr int name_attempts = 16;

/// How long a process of this user that holds a name may be silent before its name is passed over.
inline constexpr std::chrono::seconds silence{2};

/// The end of an error: what keeps two ranks from knowing each other's processes, and its cure.
inline constexpr const char* different_namespaces =
    " run in different pid namespaces: give their containers one (docker run --pid=host or --pid=container:NAME, "
    "shareProcessNamespace in Kubernetes), or use backend='tcp'";

/// Returns name number `attempt` of the domain: a hash of user id, job, domain and attempt, keyed by the job's secret.
std::string socket_name(const BootstrapOptions& options, int attempt);

/// Returns the beginning of the name that the root makes up if others hold all of those; peers look it up in the
/// kernel's list of sockets.
std::string found_name_prefix(const BootstrapOptions& options);

/// Returns nothing if the kernel refuses; then only sockets show that a peer has ended.
UniqueFd open_pidfd(pid_t pid);

/// True when the process behind `pidfd` has ended.
bool has_ended(const UniqueFd& pidfd);

/// False if the process in a socket's credentials is gone: a child that it forked may still hold the socket.
bool is_alive(pid_t pid, const UniqueFd& pidfd);

/// Rank 0 opens the domain, admits all ranks, and sends them what they need.
Membership open_domain(const BootstrapOptions& options);

/// Every other rank joins the domain.
Membership join_domain(const BootstrapOptions& options);

}  // namespace alltoallv
