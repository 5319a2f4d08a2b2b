// What the emulator reads of a rank table: how many ranks there are, and that they are well formed.
#pragma once

#include <cstdint>
#include <string>

namespace alltoallv::emulator {

/// `text` is the JSON of a rank table, version 1.0 or 1.2. Throws Failure: HCCL_E_PARA for one that HCCL refuses,
/// HCCL_E_UNAVAIL for one that is not complete yet.
uint32_t ranks_of_table(const std::string& text);

}  // namespace alltoallv::emulator
