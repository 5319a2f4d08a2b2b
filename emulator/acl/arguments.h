// Helpers of all ACL functions: checks of pointers, and the body of a function.
#pragma once

#include <string>

#include "acl/acl_api.h"
#include "runtime/failure.h"

/// The body of an ACL function: applies faults, then runs the block; Failures become messages and codes.
#define ACL_FUNCTION(...) return alltoallv::emulator::guarded(__func__, [&] { __VA_ARGS__ })

namespace alltoallv::emulator {

inline void check_pointer(const char* name, const void* pointer) {
    if (pointer == nullptr) throw Failure(acl_error_rt_param_invalid, name, " is null");
}

/// Stores a result at the caller's address.
template <class To, class From>
void give(const char* name, To* to, From value) {
    check_pointer(name, to);
    *to = static_cast<To>(value);
}

}  // namespace alltoallv::emulator
