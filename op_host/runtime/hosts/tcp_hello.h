// What ranks of several hosts tell each other about themselves while they meet.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "runtime/base/error.h"
#include "runtime/hosts/tcp_join.h"

namespace alltoallv {

inline constexpr uint32_t tcp_magic = 0xa2a70006;  // also the version of these messages
inline constexpr auto tcp_pause = std::chrono::milliseconds(50);
inline constexpr double tcp_patience = 3.0;  // seconds for an address to answer, and for every message after that

/// A rank's announcement about itself. All ranks run the same release, or joining fails.
struct TcpHello {
    uint32_t magic = 0;
    int32_t rank = 0, size = 0;
    uint32_t pid = 0;
    uint32_t checks = 1;  // 1 or 0, equal on all ranks
    char release[32] = {};
    char place[96] = {};  // distinguishes hosts, whatever their names
    char host[64] = {};
    uint32_t failure = 0;  // 0, or ErrorClass + 1 of the error that keeps it from joining
    int32_t code = 0;
    char reason[256] = {};
};

TcpHello introduce(const TcpJoinOptions& options);

/// Returns what the other ranks are told of a rank that cannot join.
Error failure_of(const TcpHello& hello, const std::string& domain);

/// Rank 0's answer: then a Hello of every rank, or the text of an error.
struct TcpAnswer {
    uint32_t magic = 0;
    uint32_t kind = 0;  // 0: welcome; else ErrorClass + 1
    uint32_t bytes = 0;
    int32_t code = 0;
};

void answer_with(int socket, const Error& error);

/// Waits for rank 0's answer; nothing if there is none that can be understood. An error that it brings is `failure`.
std::optional<TcpAnswer> receive_answer(int socket, Clock::time_point deadline, const TcpJoinOptions& options,
                                        std::optional<Error>& failure);

/// Waits until there is something to read; false at the deadline.
bool wait_readable(int socket, Clock::time_point deadline, const TcpJoinOptions& options);

template <size_t N>
std::string text_of(const char (&from)[N]) {
    return {from, strnlen(from, N)};
}

}  // namespace alltoallv
