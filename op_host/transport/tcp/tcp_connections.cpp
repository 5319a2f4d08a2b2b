#include "transport/tcp/tcp_connections.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>

#include "base/error.h"
#include "transport/tcp/tcp_socket.h"

namespace alltoallv {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr int wait_ms = 10;
constexpr double connect_seconds = 3.0;
constexpr double hello_seconds = 3.0;  // for who has connected to say who it is

struct Hello {
    int32_t rank = -1;
    uint32_t kind = 0;
    char secret[60] = {};
};

SteadyClock::time_point after(double seconds) {
    return SteadyClock::now() +
           std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(seconds));
}

/// Somebody who has connected and not yet said all of its Hello.
struct Guest {
    UniqueFd socket;
    SteadyClock::time_point deadline;
    Hello hello;
    size_t heard = 0;
};

/// False once the guest is of no use: it has hung up, or takes too long.
bool hear(Guest& guest) {
    char* const at = reinterpret_cast<char*>(&guest.hello) + guest.heard;
    const ssize_t got = ::recv(guest.socket.get(), at, sizeof guest.hello - guest.heard, MSG_DONTWAIT);
    if (got > 0) guest.heard += static_cast<size_t>(got);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return false;
    return guest.heard == sizeof guest.hello || SteadyClock::now() < guest.deadline;
}

}  // namespace

std::string random_secret() {
    std::string secret;
    std::ifstream("/proc/sys/kernel/random/uuid") >> secret;
    return secret;
}

std::string card_of(int port, const std::string& secret) {
    std::string card = std::to_string(port) + " " + secret;
    for (const std::string& address : own_addresses())
        if (card.size() + 1 + address.size() < card_bytes) card += " " + address;
    card.resize(card_bytes, '\0');
    return card;
}

std::vector<std::string> words_of(const std::string& card) {
    std::vector<std::string> words;
    std::string word;
    for (const char c : card) {
        if (c != ' ' && c != '\0') {
            word += c;
            continue;
        }
        if (!word.empty()) words.push_back(std::move(word));
        word.clear();
        if (c == '\0') break;
    }
    return words;
}

std::vector<std::vector<UniqueFd>> connect_ranks(const TcpConnectionsOptions& options) {
    const UniqueFd listener = listen_tcp(0);
    const std::vector<std::string> cards =
        options.gather(card_of(port_of(listener.get()), options.rank == 0 ? random_secret() : "-"));
    const std::string secret = words_of(cards[0]).at(1);
    std::vector<std::vector<UniqueFd>> made(options.peers.size());
    for (auto& sockets : made) sockets.resize(cards.size());
    const auto deadline = after(options.timeout);
    const auto give_up = [&](int rank) {
        if (options.poll) options.poll();
        if (SteadyClock::now() > deadline)
            throw comm_timeout("rank " + std::to_string(options.rank) + " found no way to rank " +
                               std::to_string(rank) + ", which is on another host");
    };
    // To every rank below, from every rank above.
    for (size_t kind = 0; kind < made.size(); ++kind)
        for (const int rank : options.peers[kind]) {
            if (rank > options.rank) continue;
            const std::vector<std::string> words = words_of(cards[static_cast<size_t>(rank)]);
            UniqueFd& socket = made[kind][static_cast<size_t>(rank)];
            for (size_t i = 2; !socket; i = i + 1 < words.size() ? i + 1 : 2) {
                if (i < words.size()) socket = connect_tcp({words[i], std::stoi(words[0])}, connect_seconds);
                if (!socket) give_up(rank);
            }
            Hello hello;
            hello.rank = options.rank;
            hello.kind = static_cast<uint32_t>(kind);
            std::memcpy(hello.secret, secret.data(), std::min(secret.size(), sizeof hello.secret - 1));
            if (!send_all(socket.get(), &hello, sizeof hello))
                throw peer_lost("rank " + std::to_string(rank) + " hung up");
        }
    const auto absent = [&] {
        for (size_t kind = 0; kind < made.size(); ++kind)
            for (const int rank : options.peers[kind])
                if (rank > options.rank && !made[kind][static_cast<size_t>(rank)]) return rank;
        return -1;
    };
    std::vector<Guest> guests;
    for (int next; (next = absent()) >= 0;) {
        std::vector<pollfd> ready{{listener.get(), POLLIN, 0}};
        for (const Guest& guest : guests) ready.push_back({guest.socket.get(), POLLIN, 0});
        if (::poll(ready.data(), ready.size(), wait_ms) <= 0) give_up(next);
        for (UniqueFd socket; (socket = accept_tcp(listener.get()));)
            guests.push_back({std::move(socket), after(hello_seconds), {}, 0});
        std::erase_if(guests, [&](Guest& guest) {
            if (!hear(guest)) return true;
            if (guest.heard < sizeof guest.hello) return false;
            const Hello& hello = guest.hello;
            const bool belongs = secret == std::string(hello.secret, strnlen(hello.secret, sizeof hello.secret)) &&
                                 hello.rank > options.rank && static_cast<size_t>(hello.rank) < cards.size() &&
                                 hello.kind < made.size();
            if (belongs) made[hello.kind][static_cast<size_t>(hello.rank)] = std::move(guest.socket);
            return true;
        });
    }
    for (auto& sockets : made)
        for (const UniqueFd& socket : sockets)
            if (socket) (void)::fcntl(socket.get(), F_SETFL, O_NONBLOCK);
    return made;
}

}  // namespace alltoallv
