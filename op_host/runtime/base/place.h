// Identifies the host that a process is on, as far as shared memory is concerned.
#pragma once

#include <cstdint>
#include <string>

namespace alltoallv {

/// Returns what ranks must have in common to share memory: the kernel, and the namespaces of sockets and processes.
std::string this_place();

/// Returns a hash of such a place.
uint32_t place_number(const std::string& place);

}  // namespace alltoallv
