// Reads a rank table: checks its form, and counts the ranks.
#pragma once

#include <cstdint>
#include <string>

namespace alltoallv::emulator {

/// `text` is the JSON of a rank table, version 1.0 or 1.2. Throws Failure: HCCL_E_PARA if HCCL would refuse it,
/// HCCL_E_UNAVAIL if it is not complete yet.
uint32_t ranks_of_table(const std::string& text);

}  // namespace alltoallv::emulator
