// A switch for tests: takes a synchronization out, so that a test can show that it is needed.
#pragma once

#include <string>
#include <string_view>

namespace alltoallv {

/// False for what has been left out. Every synchronization of the transport has a name of its own, and a scene in
/// tests/npu/test_npu_synchronization.py that goes wrong without it; the Python side has more
/// (alltoallv/backends/npu.py).
bool synchronizes(std::string_view name);

/// Names, separated by commas, instead of those of ALLTOALLV_TEST_WITHOUT, with which a process begins.
void leave_out_synchronizations(std::string_view names);

}  // namespace alltoallv
