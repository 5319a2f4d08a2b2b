#include "runtime/hosts/tcp_hello.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "runtime/base/place.h"
#include "runtime/base/release.h"

namespace alltoallv {
namespace {

template <size_t N>
void set_text(char (&to)[N], const std::string& text) {
    copy_text(to, N, text);
}

}  // namespace

TcpHello introduce(const TcpJoinOptions& options) {
    TcpHello hello;
    hello.magic = tcp_magic;
    hello.rank = options.rank;
    hello.size = options.size;
    hello.checks = options.check ? 1 : 0;
    hello.pid = static_cast<uint32_t>(getpid());
    set_text(hello.release, release());
    set_text(hello.place, this_place());
    (void)::gethostname(hello.host, sizeof hello.host - 1);
    if (options.failure) {
        hello.failure = static_cast<uint32_t>(options.failure->kind()) + 1;
        hello.code = static_cast<int32_t>(options.failure->code());
        set_text(hello.reason, options.failure->what());
    }
    return hello;
}

Error failure_of(const TcpHello& hello, const std::string& domain) {
    const auto kind = std::min(static_cast<ErrorClass>(hello.failure - 1), ErrorClass::resource);
    return {kind, static_cast<ErrorType>(hello.code),
            "rank " + std::to_string(hello.rank) + " cannot join domain '" + domain + "': " + text_of(hello.reason)};
}

void answer_with(int socket, const Error& error) {
    const std::string text = error.what();
    const TcpAnswer answer{tcp_magic, static_cast<uint32_t>(error.kind()) + 1, static_cast<uint32_t>(text.size()),
                           static_cast<int32_t>(error.code())};
    if (send_all(socket, &answer, sizeof answer)) (void)send_all(socket, text.data(), text.size());
}

std::optional<TcpAnswer> receive_answer(int socket, Clock::time_point deadline, const TcpJoinOptions& options,
                                        std::optional<Error>& failure) {
    TcpAnswer answer;
    if (!wait_readable(socket, deadline, options) ||
        !receive_all(socket, &answer, sizeof answer, after(tcp_patience)) || answer.magic != tcp_magic)
        return std::nullopt;
    if (answer.kind == 0) return answer;
    std::string text(std::min<size_t>(answer.bytes, 4096), '\0');
    if (!receive_all(socket, text.data(), text.size(), after(tcp_patience))) return std::nullopt;
    failure = Error(static_cast<ErrorClass>(answer.kind - 1), static_cast<ErrorType>(answer.code), text);
    return answer;
}

bool wait_readable(int socket, Clock::time_point deadline, const TcpJoinOptions& options) {
    for (pollfd ready{socket, POLLIN, 0}; Clock::now() < deadline;) {
        if (options.poll) options.poll();
        if (::poll(&ready, 1, static_cast<int>(tcp_pause.count())) > 0) return true;
    }
    return false;
}

}  // namespace alltoallv
