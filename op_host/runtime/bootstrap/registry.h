// The communication domains of this process: one communicator per domain, which is found by name.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/core/communicator.h"
#include "runtime/core/options.h"

namespace alltoallv {

using CommunicatorFactory = std::function<CommunicatorPtr(const CommunicatorOptions&)>;

/// Returns the usable communicator of the domain (for thread ranks: of that rank in it), or a new one from `make`. The
/// first request decides timeout, budget and path; a different rank or size is an error. Thread-safe.
CommunicatorPtr find_or_make_communicator(const CommunicatorOptions& options, const CommunicatorFactory& make);

/// Returns the processes of a job's ranks by its last communicator of that size; nothing if there was none.
std::vector<int64_t> processes_of(const std::string& job, int size);

/// Returns a communicator that is not found by name, after noting it for the next function.
CommunicatorPtr destroyed_with_all(CommunicatorPtr made);

/// Ends every communicator at process exit, so that the peers see a departure and not a loss, and no thread needs
/// Python for a call once Python has ended.
void destroy_all_communicators();

}  // namespace alltoallv
