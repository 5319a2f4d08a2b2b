/// \file synchronization.h
/// \brief A switch for tests: takes a synchronization out, so that a test can show that it is needed.
#pragma once

#include <string_view>

namespace alltoallv {

/// False for what ALLTOALLV_TEST_WITHOUT lists, separated by commas. Names: "agreement", "device-wait".
/// The Python side has its own (alltoallv/backends/npu.py). Read once.
bool synchronizes(std::string_view name);

}  // namespace alltoallv
