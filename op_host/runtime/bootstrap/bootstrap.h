// How the ranks of one host find each other: by an abstract Unix socket, without files.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/base/error.h"
#include "runtime/base/mapping.h"
#include "runtime/base/unique_fd.h"

namespace alltoallv {

struct BootstrapOptions {
    std::string job;     ///< equal on all ranks of a job, different between jobs; part of the socket's name
    std::string secret;  ///< the job's, if it has one: then nobody else can predict the socket's name
    std::string domain;  ///< name of the communication domain
    int rank = 0;
    int size = 1;
    std::vector<int> names;    ///< the ranks' numbers in messages, where they are others
    double timeout = 600.0;    ///< seconds until absent ranks are an error that names them
    double warn_after = 10.0;  ///< seconds until a warning does
    std::string cure;          ///< what both add: how absent ranks are started
    std::string settings;      ///< "key=value;key=value", equal on every rank
    size_t control_bytes = 0;  ///< size of the shared control segment, equal on every rank
    /// Called about every 100 ms while waiting; may throw to stop the wait (Ctrl-C).
    std::function<void()> poll;
    /// Told to the other ranks instead of joining.
    std::optional<Error> failure;
};

struct Peer {
    pid_t pid = 0;
    /// Readable when the process has ended; empty for this rank, for threads, or if the kernel refuses.
    UniqueFd pidfd;
    /// SOCK_SEQPACKET to that peer, non-blocking (unix_socket.h); empty for this rank and between threads.
    UniqueFd socket;
};

struct Membership {
    std::shared_ptr<Mapping> memory;  ///< the control segment, zeros at first; shared by all threads of a process
    std::vector<Peer> peers;          ///< one per rank
};

/// Collective over the `size` processes of a job on this host. Throws `Error`: comm_timeout names the absent ranks;
/// invalid_param, for a rank that is taken twice or different settings or sizes, on all ranks that have arrived.
Membership bootstrap_processes(const BootstrapOptions& options);

/// Does the same for ranks that are threads of this process.
Membership bootstrap_threads(const BootstrapOptions& options);

}  // namespace alltoallv
