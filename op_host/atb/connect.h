// How an operation gets its communicator: by a function that its owner supplies.
#pragma once

#include <functional>

#include "atb/all_to_all_v_param.h"
#include "core/communicator.h"

namespace alltoallv {

/// Makes the communicator that the parameters describe, or finds one that exists. Called once per operation, at its
/// first need; throws `Error`.
using Connect = std::function<CommunicatorPtr(const AllToAllVParam&)>;

}  // namespace alltoallv
