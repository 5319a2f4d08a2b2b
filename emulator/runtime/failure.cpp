#include "runtime/failure.h"

#include <cstdio>
#include <mutex>

#include "runtime/settings.h"

namespace alltoallv::emulator {
namespace {

struct Recent {
    std::mutex mutex;
    std::string message;
};

Recent& recent = *new Recent;  // never destroyed: threads use it to the end

}  // namespace

int& last_code() {
    thread_local int code = 0;
    return code;
}

int report(const char* function, int code, const std::string& message) {
    const std::string text = std::string(function) + ": " + message + " (" + std::to_string(code) + ")";
    {
        const std::lock_guard lock(recent.mutex);
        recent.message = text;
    }
    last_code() = code;
    if (settings().verbose) std::fprintf(stderr, "[alltoallv emulator] %s\n", text.c_str());
    return code;
}

std::string take_recent_message() {
    const std::lock_guard lock(recent.mutex);
    return std::move(recent.message);
}

}  // namespace alltoallv::emulator
