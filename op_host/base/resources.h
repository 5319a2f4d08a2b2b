// What the operating system gives and may run out of, as an error of its own.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

#include "base/error.h"

namespace alltoallv {

/// Whether this errno says that something has run out, rather than that something is wrong.
constexpr bool has_run_out(int number) {
    return number == EMFILE || number == ENFILE || number == EAGAIN || number == ENOMEM || number == ENOSPC ||
           number == ENOBUFS || number == EFBIG || number == EDQUOT;
}

/// The error for such a number: "<what>: <text of errno>". Memory has a class of its own in Python.
inline Error ran_out(const std::string& what, int number) {
    const bool memory = number == ENOMEM || number == ENOBUFS;
    return {ErrorClass::resource, memory ? ErrorType::OUT_OF_HOST_MEMORY : ErrorType::RT_FAIL,
            what + ": " + std::generic_category().message(number)};
}

/// For a system call that failed with `number`, likewise; of class backend_unavailable where nothing has run out.
inline Error system_error(const std::string& what, int number) {
    if (has_run_out(number)) return ran_out(what, number);
    return {ErrorClass::backend_unavailable, ErrorType::RT_FAIL, what + ": " + std::generic_category().message(number)};
}

inline bool is_memory(const Error& error) {
    return error.kind() == ErrorClass::resource && error.code() == ErrorType::OUT_OF_HOST_MEMORY;
}

}  // namespace alltoallv
