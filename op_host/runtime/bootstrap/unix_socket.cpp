// Local sockets of type AF_UNIX.
#include "runtime/bootstrap/unix_socket.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace alltoallv {

namespace {

constexpr int socket_type = SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC;

struct Address {
    sockaddr_un raw{};
    socklen_t length = 0;

    explicit Address(const std::string& name) {
        if (name.empty() || name.size() >= sizeof(raw.sun_path)) {
            throw invalid_param(1099, "socket name of ", name.size(), " bytes: expected 1 to ",
                                sizeof(raw.sun_path) - 1);
        }
        raw.sun_family = AF_UNIX;
        // The leading zero byte makes the name abstract: it lives in the kernel and vanishes with the socket.
        std::memcpy(raw.sun_path + 1, name.data(), name.size());
        length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    }

    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&raw); }
};

UniqueFd new_socket() {
    UniqueFd fd(::socket(AF_UNIX, socket_type, 0));
    if (!fd) throw system_error("cannot create a local socket", errno);
    return fd;
}

void take_descriptors(msghdr& header, std::vector<UniqueFd>& fds) {
    for (cmsghdr* item = CMSG_FIRSTHDR(&header); item != nullptr; item = CMSG_NXTHDR(&header, item)) {
        if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
        const size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        fds.reserve(fds.size() + count);
        for (size_t i = 0; i < count; ++i) {
            int fd = -1;
            std::memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof(int));
            fds.emplace_back(fd);
        }
    }
}

}  // namespace

Credentials peer_credentials(int socket) {
    ucred raw{};
    socklen_t length = sizeof(raw);
    if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &raw, &length) != 0)
        throw system_error("cannot read the credentials of a local socket's peer", errno);
    return {raw.pid, raw.uid};
}

UniqueFd listen_abstract(const std::string& name) {
    const Address address(name);
    UniqueFd fd = new_socket();
    if (::bind(fd.get(), address.get(), address.length) != 0) {
        if (errno == EADDRINUSE) return {};
        throw system_error("cannot bind the local socket @" + name, errno);
    }
    if (::listen(fd.get(), 4096) != 0) throw system_error("cannot listen on the local socket @" + name, errno);
    return fd;
}

UniqueFd accept_connection(int listener) {
    while (true) {
        UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (fd || errno == EAGAIN) return fd;
        if (errno == EINTR || errno == ECONNABORTED) continue;
        throw system_error("cannot accept a local connection", errno);
    }
}

Connection connect_abstract(const std::string& name) {
    const Address address(name);
    UniqueFd fd = new_socket();
    // A non-blocking local connect either succeeds or fails at once; it is never left in progress.
    while (::connect(fd.get(), address.get(), address.length) != 0)
        if (errno != EINTR) return {{}, errno};
    return {std::move(fd), 0};
}

std::pair<UniqueFd, UniqueFd> socket_pair() {
    int fds[2];
    if (::socketpair(AF_UNIX, socket_type, 0, fds) != 0) throw system_error("cannot create a pair of sockets", errno);
    return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

IoStatus try_send(int socket, std::string_view data, std::span<const int> fds) {
    if (data.empty() || data.size() > max_message_bytes || fds.size() > max_message_fds) {
        throw invalid_param(1100, "message of ", data.size(), " bytes with ", fds.size(),
                            " descriptors: expected 1 to ", max_message_bytes, " bytes and at most ", max_message_fds,
                            " descriptors");
    }
    alignas(cmsghdr) char control[CMSG_SPACE(max_message_fds * sizeof(int))];
    iovec part{const_cast<char*>(data.data()), data.size()};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    if (!fds.empty()) {
        const size_t bytes = fds.size_bytes();
        std::memset(control, 0, CMSG_SPACE(bytes));
        header.msg_control = control;
        header.msg_controllen = CMSG_SPACE(bytes);
        cmsghdr* item = CMSG_FIRSTHDR(&header);
        item->cmsg_level = SOL_SOCKET;
        item->cmsg_type = SCM_RIGHTS;
        item->cmsg_len = CMSG_LEN(bytes);
        std::memcpy(CMSG_DATA(item), fds.data(), bytes);
    }
    while (::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
        switch (errno) {
            case EINTR:
                continue;
            case EAGAIN:
            case ENOBUFS:
            case ETOOMANYREFS:  // the receivers have not yet received what is in flight
                return IoStatus::again;
            case EPIPE:
            case ECONNRESET:
            case ENOTCONN:
                return IoStatus::closed;
            default:
                throw system_error("cannot send over a local socket", errno);
        }
    }
    return IoStatus::done;
}

IoStatus try_receive(int socket, Message& message) {
    message.data.clear();
    message.fds.clear();
    char buffer[max_message_bytes];
    alignas(cmsghdr) char control[CMSG_SPACE(max_message_fds * sizeof(int))];
    iovec part{buffer, sizeof(buffer)};
    msghdr header{};
    ssize_t received = -1;
    // The end may be reported before what the peer sent earlier: as ECONNRESET if the peer had not read everything, as
    // 0 if it sent and closed just now. So each end is read once more, and the third in a row is final.
    for (int ends = 0; received <= 0;) {
        header = {};
        header.msg_iov = &part;
        header.msg_iovlen = 1;
        header.msg_control = control;
        header.msg_controllen = sizeof(control);
        received = ::recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (received > 0 || (received < 0 && errno == EINTR)) continue;
        if (received < 0 && errno == EAGAIN) return IoStatus::again;
        if (received < 0 && errno != ECONNRESET) throw system_error("cannot receive from a local socket", errno);
        if (++ends == 3) return IoStatus::closed;  // empty messages are never sent
    }
    take_descriptors(header, message.fds);
    message.data.assign(buffer, static_cast<size_t>(received));
    if ((header.msg_flags & MSG_CTRUNC) != 0) {
        message.fds.clear();
        throw system_error(
            "cannot receive a descriptor over a local socket; the limit of open files (ulimit -n) may be reached",
            EMFILE);
    }
    if ((header.msg_flags & MSG_TRUNC) != 0) {
        message.fds.clear();
        throw backend_unavailable(5016, "a message of more than ", max_message_bytes,
                                  " bytes arrived over a local socket");
    }
    return IoStatus::done;
}

}  // namespace alltoallv
