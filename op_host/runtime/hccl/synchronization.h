// A switch for tests that removes a synchronization, to show that it is needed.
#pragma once

#include <string>
#include <string_view>

namespace alltoallv {

/// Returns false for a removed synchronization. Every synchronization of the transport has its own name, and a scene
/// in tests/npu/test_npu_synchronization.py that fails without it; the Python side has more
/// (alltoallv/torch/engines/hccl.py).
bool synchronizes(std::string_view name);

/// Sets the names, separated by commas; they replace the names in ALLTOALLV_TEST_WITHOUT, with which a process starts.
void leave_out_synchronizations(std::string_view names);

}  // namespace alltoallv
