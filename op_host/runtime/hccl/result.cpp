#include "runtime/hccl/result.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

#include "runtime/hccl/library.h"

namespace alltoallv {
namespace {

/// The names of HcclResult 0 to 24.
constexpr std::array<std::string_view, 25> result_names{
    "HCCL_SUCCESS",
    "HCCL_E_PARA",
    "HCCL_E_PTR",
    "HCCL_E_MEMORY",
    "HCCL_E_INTERNAL",
    "HCCL_E_NOT_SUPPORT",
    "HCCL_E_NOT_FOUND",
    "HCCL_E_UNAVAIL",
    "HCCL_E_SYSCALL",
    "HCCL_E_TIMEOUT",
    "HCCL_E_OPEN_FILE_FAILURE",
    "HCCL_E_TCP_CONNECT",
    "HCCL_E_ROCE_CONNECT",
    "HCCL_E_TCP_TRANSFER",
    "HCCL_E_ROCE_TRANSFER",
    "HCCL_E_RUNTIME",
    "HCCL_E_DRV",
    "HCCL_E_PROFILING",
    "HCCL_E_CCE",
    "HCCL_E_NETWORK",
    "HCCL_E_AGAIN",
    "HCCL_E_REMOTE",
    "HCCL_E_SUSPENDING",
    "HCCL_E_OPRETRY_FAIL",
    "HCCL_E_OOM",
};

std::string setting(const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    return std::string(name) + " (now " + (value != nullptr && *value != 0 ? value : otherwise) + ")";
}

bool is_init(const std::string& call) {
    return call.find("Init") != std::string::npos || call == "HcclGetRootInfo";
}

std::string advice(HcclResult result, const std::string& call, const BufferAdvice& buffer) {
    switch (result) {
        case HCCL_E_MEMORY:
        case HCCL_E_OOM: {
            std::string text = "free device memory, or lower " +
                               (buffer.setting.empty() ? buffer_variable() : buffer.setting) +
                               ": every communicator takes twice that many MB";
            if (buffer.bytes > 0)
                text += "; this call moves " + std::to_string((buffer.bytes + (uint64_t{1} << 20) - 1) >> 20) +
                        " MB per rank: that is the size needed for full speed, HCCL does with less";
            return text;
        }
        case HCCL_E_TIMEOUT:
        case HCCL_E_TCP_CONNECT:
            if (is_init(call))
                return "a rank did not come in time: see that all ranks run, or raise " +
                       setting("HCCL_CONNECT_TIMEOUT", "120") + " seconds";
            return "a rank is late or gone: see that all ranks issue this operator, or raise " +
                   setting("HCCL_EXEC_TIMEOUT", "1836") + " seconds";
        case HCCL_E_REMOTE:
            return "a peer or the network failed while data moved: see the peers' logs";
        case HCCL_E_AGAIN:
            return "the communicator is in use: wait for its operators";
        default:
            return "see the logs in ~/ascend/log (ASCEND_PROCESS_LOG_PATH)";
    }
}

std::string recent_message() {
    const auto recent = cann().aclGetRecentErrMsg;
    const char* text = recent != nullptr ? recent() : nullptr;
    if (text == nullptr || *text == 0) return "";
    std::string first(text);
    first.resize(std::min(first.find('\n'), first.size()));
    return first.empty() ? "" : " [" + first + "]";
}

}  // namespace

ErrorType code_of(HcclResult result) {
    switch (result) {
        case HCCL_SUCCESS:
            return ErrorType::NO_ERROR;
        case HCCL_E_PARA:
            return ErrorType::INVALID_PARAM;
        case HCCL_E_MEMORY:
        case HCCL_E_OOM:
            return ErrorType::OUT_OF_DEVICE_MEMORY;
        default:
            return ErrorType::HCCL_FAIL;
    }
}

std::string hccl_name(HcclResult result) {
    const auto index = static_cast<size_t>(result);
    if (index < result_names.size()) return std::string(result_names[index]);
    return "HcclResult " + std::to_string(result);
}

std::string buffer_variable() {
    return setting("HCCL_BUFFSIZE", "200");
}

Error hccl_error(HcclResult result, const std::string& call, const std::string& where, const BufferAdvice& buffer) {
    const char* text = cann().HcclGetErrorString(result);
    return {ErrorClass::hccl, code_of(result),
            with_id(7001, where + ": " + call + " returned " + std::to_string(result) + " (" + hccl_name(result) +
                              (text != nullptr && *text != 0 ? std::string(", ") + text : "") + ")" + recent_message() +
                              "; " + advice(result, call, buffer))};
}

Error acl_error(aclError result, const std::string& call, const std::string& where) {
    return {ErrorClass::hccl, ErrorType::RT_FAIL,
            with_id(7002, where + ": " + call + " returned " + std::to_string(result) + recent_message() +
                              "; see the logs in ~/ascend/log (ASCEND_PROCESS_LOG_PATH)")};
}

}  // namespace alltoallv
