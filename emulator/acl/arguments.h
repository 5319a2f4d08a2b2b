// What the ACL functions share: checks of pointers, and the body of a function.
#pragma once

#include <string>

#include "acl/acl_api.h"
#include "runtime/failure.h"

/// The body of an ACL function: faults, then the block; Failures become messages and codes.
#define ACL_FUNCTION(...) return alltoallv::emulator::guarded(__func__, [&] { __VA_ARGS__ })

namespace alltoallv::emulator {

inline void check_pointer(const char* name, const void* pointer) {
    if (pointer == nullptr) throw Failure(acl_error_rt_param_invalid, std::string(name) + " is null");
}

/// Stores a result where the caller wants it.
template <class To, class From>
void give(const char* name, To* to, From value) {
    check_pointer(name, to);
    *to = static_cast<To>(value);
}

}  // namespace alltoallv::emulator
