// Which host a process is on, as far as sharing memory goes.
#pragma once

#include <cstdint>
#include <string>

namespace alltoallv {

/// What ranks must have in common to share memory: the kernel, and the namespaces of sockets and processes.
std::string this_place();

/// A number of such a place.
uint32_t place_number(const std::string& place);

}  // namespace alltoallv
