// How kernels start on a device: a function in the ASC language (launch.asc), called from C++.
#pragma once

#include <cstdint>

#include "runtime/abi/acl.h"

/// Enqueues the kernel of that name; arguments are addresses of device memory, as many as it takes. Returns 1 for an
/// unknown name, else 0.
extern "C" int alltoallv_launch(const char* kernel, uint32_t cores, aclrtStream stream, uint8_t* const* arguments);
