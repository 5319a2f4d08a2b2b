/// \file liveness.h
/// \brief What this process knows about the lives of others, for waits in which no communicator with them exists yet.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/core/options.h"

namespace alltoallv {

/// Returns "running", "stopped" or "gone": what the kernel says about a process of this host.
const char* process_state(uint32_t pid);

/// Processes have one number on all hosts: the place (base/place.h) and the pid; 0 is unknown.
class Liveness {
  public:
    static int64_t process(uint32_t place, uint32_t pid) { return static_cast<int64_t>(place) << 32 | pid; }

    /// Returns how a process has ended, or was lost to a communicator of this process; empty if it may live.
    static std::string end_of(int64_t process);

    /// Writes a loss to stderr, once for each process: a launcher may end this one before its program, which may be
    /// computing or in a framework's graph, has raised any error.
    static void report(int64_t process, const std::string& loss);

    /// Notes that a call has raised the loss of a process: the program knows that it has to go on without it, or with
    /// another in its place.
    static void tell(int64_t process);

    /// Returns the processes, with 0 for those whose loss has been told.
    static std::vector<int64_t> untold(std::vector<int64_t> processes);

    /// Throws peer_lost if one of the `processes`, by rank, will not come to `domain`.
    static void check(const std::vector<int64_t>& processes, int rank, const std::string& domain);

    /// Returns a function for waits in which ranks join: it calls `hooks().poll`, and sees to what `check` does.
    static std::function<void()> poll(const CommunicatorOptions& options);
};

}  // namespace alltoallv
