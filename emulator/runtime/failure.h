// Failures of the emulator's functions: a number, and a message with the function's name.
#pragma once

#include <stdexcept>
#include <string>

#include "runtime/base/error.h"
#include "runtime/faults.h"

namespace alltoallv::emulator {

/// Thrown inside the emulator, caught at its C functions.
class Failure : public std::runtime_error {
  public:
    template <class... Parts>
    explicit Failure(int code, const Parts&... message) : std::runtime_error(joined(message...)), code_(code) {}
    int code() const { return code_; }

  private:
    int code_;
};

/// Keeps the message for aclGetRecentErrMsg, prints it on standard error, and returns `code`.
int report(const char* function, int code, const std::string& message);

/// Returns the message reported last in this process and forgets it; empty if there is none.
std::string take_recent_message();

/// Returns this thread's last code, for aclrtGetLastError.
int& last_code();

/// Runs the body of an ACL function: applies faults, then calls `body`, which returns nothing and throws Failure.
template <class Body>
int guarded(const char* function, Body&& body) {
    try {
        if (const int code = apply_at_call(function, fault_of(function)); code != 0) return code;
        body();
        return 0;
    } catch (const Failure& failure) {
        return report(function, failure.code(), failure.what());
    } catch (const std::exception& error) {
        return report(function, 500000, error.what());  // ACL_ERROR_INTERNAL_ERROR
    }
}

}  // namespace alltoallv::emulator
