// What torch_npu calls whether or not anybody profiles or dumps. Nothing is collected, and nothing claims that it was:
// to start a profile (aclprof*) fails.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

#include "runtime/failure.h"

#pragma GCC visibility push(default)
extern "C" {

int32_t MsprofRegisterCallback(uint32_t, void*);
uint64_t MsprofGetHashId(const char* text, size_t length);
int32_t MsprofReportApi(uint32_t, const void*);
int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t);
int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t);
uint64_t MsprofSysCycleTime();

/// The callback would be called when a profile starts: never.
int32_t MsprofRegisterCallback(uint32_t, void*) {
    return 0;
}

uint64_t MsprofGetHashId(const char* text, size_t length) {
    return text == nullptr ? 0 : std::hash<std::string_view>{}({text, length});
}

int32_t MsprofReportApi(uint32_t, const void*) {
    return 0;
}

int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) {
    return 0;
}

int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) {
    return 0;
}

uint64_t MsprofSysCycleTime() {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

}  // extern "C"
#pragma GCC visibility pop
