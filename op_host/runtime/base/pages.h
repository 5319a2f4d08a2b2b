/// \file pages.h
/// \brief The unit in which memory can be mapped.
#pragma once

#include <cstddef>

namespace alltoallv {

/// Returns the bytes of a page: 4 KiB, or 16 or 64 KiB on many servers with Arm processors. Below a system that
/// emulates a processor, sysconf may tell of less than what can be mapped at an address, so that is tried out.
size_t page_size();

}  // namespace alltoallv
