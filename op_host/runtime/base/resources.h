// Turns an exhausted resource of the operating system into an error of its own class.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

#include "runtime/base/error.h"

namespace alltoallv {

/// True if this errno means that a resource has run out, false if something is wrong.
constexpr bool has_run_out(int number) {
    return number == EMFILE || number == ENFILE || number == EAGAIN || number == ENOMEM || number == ENOSPC ||
           number == ENOBUFS || number == EFBIG || number == EDQUOT;
}

/// Returns the error for such an errno: "<what>: <text of errno>". Memory has its own class in Python.
inline Error ran_out(const std::string& what, int number) {
    const bool memory = number == ENOMEM || number == ENOBUFS;
    return {ErrorClass::resource, memory ? ErrorType::OUT_OF_HOST_MEMORY : ErrorType::RT_FAIL,
            with_id(5066, what + ": " + std::generic_category().message(number))};
}

/// Returns the error of a failed system call; its class is backend_unavailable unless a resource has run out.
inline Error system_error(const std::string& what, int number) {
    if (has_run_out(number)) return ran_out(what, number);
    return {ErrorClass::backend_unavailable, ErrorType::RT_FAIL,
            with_id(5067, what + ": " + std::generic_category().message(number))};
}

inline bool is_memory(const Error& error) {
    return error.kind() == ErrorClass::resource && error.code() == ErrorType::OUT_OF_HOST_MEMORY;
}

}  // namespace alltoallv
