#include "runtime/hosts/tcp_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "runtime/bootstrap/unix_socket.h"

namespace alltoallv {
namespace {

constexpr int backlog = 1024;
constexpr int send_seconds = 30;
constexpr int probe_after = 10, probe_every = 5, probes = 4;  // of a silent connection, in seconds (the last: a number)

void set_option(int socket, int level, int name, int value) {
    (void)setsockopt(socket, level, name, &value, sizeof value);
}

/// Turns keepalive on, because a host that loses power sends nothing.
void set_up(int socket) {
    set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, probe_after);
    set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, probe_every);
    set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, probes);
    const timeval limit{send_seconds, 0};
    (void)setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

bool wait_for(int socket, short events, Clock::time_point deadline) {
    for (;;) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
        pollfd waiting{socket, events, 0};
        const int ready = poll(&waiting, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000)));
        if (ready > 0) return true;
        if (ready < 0 && errno != EINTR) return false;
        if (left.count() <= 0) return false;
    }
}

/// Throws if there are too few descriptors to read the files that name hosts.
void check_descriptors() {
    UniqueFd sockets[4];
    for (UniqueFd& socket : sockets) {
        socket = UniqueFd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
        if (!socket) throw system_error("cannot make a socket", errno);
    }
}

/// Matches HCCL_SOCKET_IFNAME like HCCL: prefixes of names; a leading "^" excludes them, "=" means whole names.
bool is_wanted(std::string_view interface, std::string_view wanted) {
    if (wanted.empty()) return true;
    const bool excludes = wanted.starts_with('^');
    if (excludes) wanted.remove_prefix(1);
    const bool whole = wanted.starts_with('=');
    if (whole) wanted.remove_prefix(1);
    while (!wanted.empty()) {
        const size_t comma = std::min(wanted.find(','), wanted.size());
        const std::string_view name = wanted.substr(0, comma);
        if (!name.empty() && (whole ? interface == name : interface.starts_with(name))) return !excludes;
        wanted.remove_prefix(std::min(comma + 1, wanted.size()));
    }
    return excludes;
}

std::string number_of(const sockaddr* address) {
    const socklen_t length = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    char text[NI_MAXHOST];
    if (getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return {};
    return text;
}

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr ? value : "";
}

}  // namespace

UniqueFd listen_tcp(int port) {
    for (const int family : {AF_INET6, AF_INET}) {
        UniqueFd listener(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (!listener && has_run_out(errno)) break;
        if (!listener) continue;  // a host without IPv6
        set_option(listener.get(), SOL_SOCKET, SO_REUSEADDR, 1);
        if (family == AF_INET6) set_option(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
        sockaddr_in6 any{};  // an address of zeros; also for IPv4, whose port is at the same offset
        any.sin6_family = static_cast<sa_family_t>(family);
        any.sin6_port = htons(static_cast<uint16_t>(port));
        const socklen_t length = family == AF_INET6 ? sizeof any : sizeof(sockaddr_in);
        if (::bind(listener.get(), reinterpret_cast<sockaddr*>(&any), length) == 0 &&
            ::listen(listener.get(), backlog) == 0)
            return listener;
        if (errno == EADDRINUSE) return {};
        if (family == AF_INET) throw system_error("cannot listen on port " + std::to_string(port), errno);
    }
    throw system_error("cannot make a socket", errno);
}

int port_of(int listener) {
    sockaddr_in6 address{};
    socklen_t length = sizeof address;
    if (::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0)
        throw system_error("cannot tell the port of a socket", errno);
    return ntohs(address.sin6_port);  // at the same offset for IPv4
}

std::vector<std::string> own_addresses() {
    std::vector<std::string> addresses, loopback;
    if (const std::string chosen = environment("HCCL_IF_IP"); !chosen.empty()) addresses.push_back(chosen);
    const std::string wanted = environment("HCCL_SOCKET_IFNAME");
    ifaddrs* all = nullptr;
    if (getifaddrs(&all) != 0) {
        if (has_run_out(errno)) throw system_error("cannot list this host's addresses", errno);
        return addresses;
    }
    const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, &freeifaddrs);
    for (const int family : {AF_INET, AF_INET6}) {
        for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
            if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != family || (i->ifa_flags & IFF_UP) == 0) continue;
            const bool loops = (i->ifa_flags & IFF_LOOPBACK) != 0;
            if (!loops && !is_wanted(i->ifa_name, wanted)) continue;
            const std::string number = number_of(i->ifa_addr);
            if (number.empty() || number.find('%') != std::string::npos) continue;  // valid on this link only
            (loops ? loopback : addresses).push_back(number);
        }
    }
    addresses.insert(addresses.end(), loopback.begin(), loopback.end());
    return addresses;
}

UniqueFd accept_tcp(int listener) {
    UniqueFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (socket) set_up(socket.get());
    return socket;
}

UniqueFd connect_tcp(const TcpAddress& address, double seconds) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const std::string port = std::to_string(address.port);
    if (::getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found) != 0) {
        check_descriptors();
        return {};
    }
    const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
    for (const addrinfo* i = found; i != nullptr; i = i->ai_next) {
        UniqueFd socket(::socket(i->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (!socket && has_run_out(errno)) throw system_error("cannot make a socket", errno);
        if (!socket) continue;
        if (::connect(socket.get(), i->ai_addr, i->ai_addrlen) != 0) {
            if (errno != EINPROGRESS) continue;
            if (!wait_for(socket.get(), POLLOUT, after(seconds))) continue;
            int error = 0;
            socklen_t length = sizeof error;
            if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) continue;
        }
        (void)::fcntl(socket.get(), F_SETFL, 0);  // blocks from here on
        set_up(socket.get());
        return socket;
    }
    return {};
}

bool send_all(int socket, const void* data, size_t bytes) {
    const auto* next = static_cast<const char*>(data);
    while (bytes > 0) {
        const ssize_t sent = ::send(socket, next, bytes, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return false;
        next += sent;
        bytes -= static_cast<size_t>(sent);
    }
    return true;
}

bool receive_all(int socket, void* data, size_t bytes, Clock::time_point deadline) {
    auto* next = static_cast<char*>(data);
    while (bytes > 0) {
        if (!wait_for(socket, POLLIN, deadline)) return false;
        const ssize_t got = ::recv(socket, next, bytes, MSG_DONTWAIT);
        if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (got <= 0) return false;
        next += got;
        bytes -= static_cast<size_t>(got);
    }
    return true;
}

}  // namespace alltoallv
