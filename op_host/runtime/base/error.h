// The exception type of the core, and ATB's status numbers.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace alltoallv {

/// Status numbers of Huawei's ATB (`atb::ErrorType`), so that a code means the same in both libraries.
enum class ErrorType : int32_t {
    NO_ERROR = 0,
    INVALID_PARAM = 1,
    INVALID_GRAPH = 2,
    INTERNAL_ERROR = 3,
    RT_FAIL = 4,
    INVALID_IN_TENSOR_NUM = 5,
    INVALID_TENSOR_DTYPE = 6,
    INVALID_TENSOR_FORMAT = 7,
    INVALID_TENSOR_DIM = 8,
    INVALID_TENSOR_SIZE = 9,
    OPERATION_NULL_RUNNER = 10,
    GRAPH_INFERSHAPE_FUNC_FAIL = 11,
    CANN_ERROR = 12,
    INVALID_TENSOR_INI_MATCH = 13,
    INVALID_TENSOR_ADDR = 14,
    INVALID_TENSOR_NUM = 15,
    INVALID_TENSOR_DIM_NUM = 16,
    INVALID_SINGLE_OPERATION_PARAM = 17,
    GRAPH_NODE_RESHAPE_FUNC_FAIL = 18,
    INVALID_GRAPH_NODE_CHUNK = 19,
    INVALID_CONTEXT_ADDR = 20,
    INVALID_STREAM = 21,
    INVALID_WORKSPACE_SIZE = 22,
    INVALID_WORKSPACE_ADDR = 23,
    INVALID_OPERATION_ADDR = 24,
    HCCL_FAIL = 25,
    OUT_OF_DEVICE_MEMORY = 26,
    OUT_OF_HOST_MEMORY = 27,
    COMM_EMPTY = 28,
    COPY_HOST_MEMORY_FAIL = 29,
};

/// The class of `alltoallv.errors` that a failure becomes in Python.
enum class ErrorClass : uint8_t {
    invalid_param,
    invalid_tensor,
    peer_mismatch,
    peer_lost,
    comm_timeout,
    hccl,
    backend_unavailable,
    value_overflow,
    deadlock,
    resource,
};

/// Every failure of the core. `what()` is one sentence for the user, and the id of its condition.
class Error : public std::runtime_error {
  public:
    Error(ErrorClass kind, ErrorType code, const std::string& message)
        : std::runtime_error(message), kind_(kind), code_(code) {}

    ErrorClass kind() const { return kind_; }
    ErrorType code() const { return code_; }

  private:
    ErrorClass kind_;
    ErrorType code_;
};

/// A peer refused its caller's arguments, and no rank calls the operator that it announced: a mistake of that rank
/// alone, after which its next call meets the call that this rank makes now, as the next operator.
struct UnmetFailure : Error {
    explicit UnmetFailure(const Error& error) : Error(error) {}
};

/// Joins texts and numbers.
template <class... Parts>
std::string joined(const Parts&... parts) {
    std::string text;
    const auto add = [&text](const auto& part) {
        if constexpr (std::is_convertible_v<decltype(part), std::string_view>)
            text += std::string_view(part);
        else
            text += std::to_string(part);
    };
    (add(parts), ...);
    return text;
}

/// The id at the end of a message, as " [A2A-1203]"; empty if it has none.
inline std::string_view id_of(std::string_view message) {
    constexpr std::string_view form = " [A2A-0000]";
    if (message.size() < form.size()) return {};
    const std::string_view end = message.substr(message.size() - form.size());
    return end.starts_with(" [A2A-") && end.ends_with(']') ? end : std::string_view{};
}

/// Ends a message with the id of its condition, which docs/error-ids.md lists; that of a cause stays.
inline std::string with_id(int id, std::string message) {
    if (!id_of(message).empty()) return message;
    return std::move(message) + " [A2A-" + std::to_string(id) + "]";
}

/// Copies as much of `text` as fits and its id, whole UTF-8 characters only: half of one could not become a Python
/// string.
inline void copy_text(char* to, size_t capacity, std::string_view text) {
    const std::string_view id = id_of(text);
    size_t length = text.size() - id.size();
    if (text.size() >= capacity) {
        length = capacity - 1 - id.size();
        while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80) --length;
    }
    text.copy(to, length);
    id.copy(to + length, id.size());
    to[length + id.size()] = 0;
}

template <class... Parts>
Error invalid_param(int id, const Parts&... message) {
    return {ErrorClass::invalid_param, ErrorType::INVALID_PARAM, with_id(id, joined(message...))};
}

template <class... Parts>
Error invalid_tensor(int id, ErrorType code, const Parts&... message) {
    return {ErrorClass::invalid_tensor, code, with_id(id, joined(message...))};
}

template <class... Parts>
Error peer_mismatch(int id, const Parts&... message) {
    return {ErrorClass::peer_mismatch, ErrorType::INVALID_PARAM, with_id(id, joined(message...))};
}

template <class... Parts>
Error peer_lost(int id, const Parts&... message) {
    return {ErrorClass::peer_lost, ErrorType::HCCL_FAIL, with_id(id, joined(message...))};
}

template <class... Parts>
Error comm_timeout(int id, const Parts&... message) {
    return {ErrorClass::comm_timeout, ErrorType::HCCL_FAIL, with_id(id, joined(message...))};
}

template <class... Parts>
Error value_overflow(int id, const Parts&... message) {
    return {ErrorClass::value_overflow, ErrorType::INTERNAL_ERROR, with_id(id, joined(message...))};
}

template <class... Parts>
Error deadlock(int id, const Parts&... message) {
    return {ErrorClass::deadlock, ErrorType::INVALID_PARAM, with_id(id, joined(message...))};
}

/// A resource of the operating system has run out: threads, descriptors, memory.
template <class... Parts>
Error resource_error(int id, const Parts&... message) {
    return {ErrorClass::resource, ErrorType::OUT_OF_HOST_MEMORY, with_id(id, joined(message...))};
}

template <class... Parts>
Error backend_unavailable(int id, const Parts&... message) {
    return {ErrorClass::backend_unavailable, ErrorType::COMM_EMPTY, with_id(id, joined(message...))};
}

}  // namespace alltoallv
