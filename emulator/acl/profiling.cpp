// The functions that torch_npu calls even if nobody profiles or dumps. They collect nothing and report nothing as
// collected: starting a profile (aclprof*) fails.
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

/// Accepts a callback that is never called, because no profile starts.
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
