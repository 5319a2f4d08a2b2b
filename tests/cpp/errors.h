// Errors that calls must raise.
#pragma once

#include <functional>
#include <string>

#include "check.h"
#include "runtime/base/error.h"

namespace testing {

/// `call` must throw an error of this class with a message that contains `part`; returns the message.
inline std::string fails(alltoallv::ErrorClass kind, const std::string& part, const std::function<void()>& call) {
    try {
        call();
    } catch (const alltoallv::Error& error) {
        const std::string message = error.what();
        if (error.kind() == kind && message.find(part) != std::string::npos) return message;
        throw std::runtime_error("expected '" + part + "' of class " + std::to_string(static_cast<int>(kind)) +
                                 ", got '" + message + "' of class " + std::to_string(static_cast<int>(error.kind())));
    }
    throw std::runtime_error("expected '" + part + "', got no error");
}

}  // namespace testing
