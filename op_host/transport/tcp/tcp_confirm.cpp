// The end of a meeting: either all ranks have what they need, or all raise the same error.
#include "base/error.h"
#include "transport/tcp/tcp_introduction.h"

namespace alltoallv {
namespace {

std::string lost(int rank) {
    return "rank " + std::to_string(rank) + " was lost while it joined: its connection has ended";
}

/// Hears every other rank, even after a failure, so that none hears its answer while it still joins.
std::optional<Error> hear_all(const TcpMembership& membership, const TcpMeetingOptions& options) {
    const Clock::time_point deadline = after(options.timeout);
    std::optional<Error> failure;
    for (size_t j = 1; j < membership.sockets.size(); ++j) {
        const int socket = membership.sockets[j].get();
        TcpHello hello;
        const bool heard =
            wait_to_hear(socket, deadline, options) && receive_all(socket, &hello, sizeof hello, after(tcp_patience));
        if (failure || (heard && hello.failure == 0)) continue;
        failure = heard ? failure_of(hello, options.domain) : peer_lost(lost(static_cast<int>(j)));
    }
    return failure;
}

}  // namespace

void confirm(const TcpMembership& membership, TcpMeetingOptions options, const std::optional<Error>& failure) {
    options.failure = failure;
    const TcpHello hello = introduce(options);
    std::optional<Error> heard;
    if (options.rank != 0) {
        const int socket = membership.sockets[0].get();
        if (!send_all(socket, &hello, sizeof hello) ||
            !hear_answer(socket, after(options.timeout + tcp_patience), options, heard))
            heard = peer_lost(lost(0));
    } else {
        heard = hear_all(membership, options);
        if (failure) heard = failure_of(hello, options.domain);
        const TcpAnswer welcome{tcp_magic};
        for (const UniqueFd& socket : membership.sockets) {
            if (socket && heard) answer_with(socket.get(), *heard);
            if (socket && !heard) (void)send_all(socket.get(), &welcome, sizeof welcome);
        }
    }
    if (failure) throw *failure;
    if (heard) throw *heard;
}

}  // namespace alltoallv
