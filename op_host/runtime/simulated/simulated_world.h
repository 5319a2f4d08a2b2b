/// \file simulated_world.h
/// \brief Ranks of one process that meet at a table: worlds of a thousand ranks for tests of what programs do there.
///
/// They have no segments, rings or rows of their own. The last rank of an operator compares all calls and moves
/// everybody's data while the others wait.
#pragma once

#include <string>
#include <vector>

#include "runtime/core/communicator.h"

namespace alltoallv {

/// Returns the communicators of a new world, one per rank; each is for a thread. They exchange and reduce, and know
/// neither messages nor quantized reductions. `timeout` is in seconds.
std::vector<CommunicatorPtr> simulate(int size, const std::string& domain, double timeout);

}  // namespace alltoallv
