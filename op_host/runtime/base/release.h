// The release of this package, which must be the same on all ranks.
#pragma once

#include <string>

namespace alltoallv {

/// Returns it as the package's `__version__` has it.
std::string release();

}  // namespace alltoallv
