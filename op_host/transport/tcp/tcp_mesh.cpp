#include "transport/tcp/tcp_mesh.h"

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
constexpr size_t most_at_once = size_t{1} << 20;

struct Hello {
    int32_t rank = -1;
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

std::string card_of(int port, const std::string& secret, size_t bytes) {
    std::string card = std::to_string(port) + " " + secret;
    for (const std::string& address : own_addresses())
        if (card.size() + 1 + address.size() < bytes) card += " " + address;
    card.resize(bytes, '\0');
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

TcpMesh::TcpMesh(const TcpMeshOptions& options) {
    const UniqueFd listener = listen_tcp(0);
    const std::vector<std::string> cards =
        options.gather(card_of(port_of(listener.get()), options.rank == 0 ? random_secret() : "-", card_bytes));
    connections_.resize(cards.size());
    connect_all(options, cards, words_of(cards[0]).at(1), listener);
}

/// To every rank below, from every rank above.
void TcpMesh::connect_all(const TcpMeshOptions& options, const std::vector<std::string>& cards,
                          const std::string& secret, const UniqueFd& listener) {
    const auto deadline = after(options.timeout);
    const auto give_up = [&](int rank) {
        if (options.poll) options.poll();
        if (SteadyClock::now() > deadline)
            throw comm_timeout("rank " + std::to_string(options.rank) + " found no way to rank " +
                               std::to_string(rank) + ", which is on another host");
    };
    for (const int rank : options.peers) {
        if (rank > options.rank) continue;
        const std::vector<std::string> words = words_of(cards[static_cast<size_t>(rank)]);
        UniqueFd& socket = connections_[static_cast<size_t>(rank)].socket;
        for (size_t i = 2; !socket; i = i + 1 < words.size() ? i + 1 : 2) {
            if (i < words.size()) socket = connect_tcp({words[i], std::stoi(words[0])}, connect_seconds);
            if (!socket) give_up(rank);
        }
        Hello hello;
        hello.rank = options.rank;
        std::memcpy(hello.secret, secret.data(), std::min(secret.size(), sizeof hello.secret - 1));
        if (!send_all(socket.get(), &hello, sizeof hello)) throw peer_lost("rank " + std::to_string(rank) + " hung up");
    }
    std::vector<Guest> guests;
    for (;;) {
        const auto absent = std::find_if(options.peers.begin(), options.peers.end(), [&](int rank) {
            return rank > options.rank && !connections_[static_cast<size_t>(rank)].socket;
        });
        if (absent == options.peers.end()) break;
        std::vector<pollfd> ready{{listener.get(), POLLIN, 0}};
        for (const Guest& guest : guests) ready.push_back({guest.socket.get(), POLLIN, 0});
        if (::poll(ready.data(), ready.size(), wait_ms) <= 0) give_up(*absent);
        for (UniqueFd socket; (socket = accept_tcp(listener.get()));)
            guests.push_back({std::move(socket), after(hello_seconds), {}, 0});
        std::erase_if(guests, [&](Guest& guest) {
            if (!hear(guest)) return true;
            if (guest.heard < sizeof guest.hello) return false;
            const bool belongs = secret == std::string(guest.hello.secret, strnlen(guest.hello.secret, 60)) &&
                                 guest.hello.rank > options.rank &&
                                 static_cast<size_t>(guest.hello.rank) < connections_.size();
            if (belongs) connections_[static_cast<size_t>(guest.hello.rank)].socket = std::move(guest.socket);
            return true;
        });
    }
    for (Connection& connection : connections_)
        if (connection.socket) (void)::fcntl(connection.socket.get(), F_SETFL, O_NONBLOCK);
}

void TcpMesh::begin(std::span<const Outgoing> out, std::span<const Incoming> in) {
    for (const Outgoing& piece : out) connections_[static_cast<size_t>(piece.rank)].out = piece;
    for (const Incoming& piece : in) connections_[static_cast<size_t>(piece.rank)].in = piece;
    pending_ = static_cast<size_t>(
        std::count_if(connections_.begin(), connections_.end(), [](const Connection& c) { return c.busy(); }));
}

/// What goes without waiting; both ways by turns, so that neither starves.
void TcpMesh::pump(int rank, Connection& connection) {
    const auto lost = [rank] { return peer_lost("the connection to rank " + std::to_string(rank) + " has ended"); };
    for (bool moved = true; moved;) {
        moved = false;
        if (Outgoing& out = connection.out; out.bytes > 0) {
            const ssize_t sent =
                ::send(connection.socket.get(), out.data, std::min(out.bytes, most_at_once), MSG_NOSIGNAL);
            if (sent < 0 && errno != EAGAIN && errno != EINTR) throw lost();
            if (sent > 0) {
                out.data += sent;
                out.bytes -= static_cast<size_t>(sent);
                moved = true;
            }
        }
        if (Incoming& in = connection.in; in.bytes > 0) {
            const ssize_t got = ::recv(connection.socket.get(), in.data, std::min(in.bytes, most_at_once), 0);
            if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) throw lost();
            if (got > 0) {
                in.data += got;
                in.bytes -= static_cast<size_t>(got);
                moved = true;
            }
        }
    }
    if (!connection.busy()) --pending_;
}

bool TcpMesh::progress() {
    std::vector<pollfd> ready;
    std::vector<int> ranks;
    for (size_t j = 0; pending_ > 0 && j < connections_.size(); ++j) {
        const Connection& connection = connections_[j];
        if (!connection.busy()) continue;
        const int events = (connection.out.bytes > 0 ? POLLOUT : 0) | (connection.in.bytes > 0 ? POLLIN : 0);
        ready.push_back({connection.socket.get(), static_cast<short>(events), 0});
        ranks.push_back(static_cast<int>(j));
    }
    if (!ready.empty() && ::poll(ready.data(), ready.size(), wait_ms) > 0)
        for (size_t i = 0; i < ready.size(); ++i)
            if (ready[i].revents != 0) pump(ranks[i], connections_[static_cast<size_t>(ranks[i])]);
    return pending_ == 0;
}

std::vector<int> TcpMesh::missing() const {
    std::vector<int> ranks;
    for (size_t j = 0; j < connections_.size(); ++j)
        if (connections_[j].busy()) ranks.push_back(static_cast<int>(j));
    return ranks;
}

void TcpMesh::close() {
    for (Connection& connection : connections_) connection.socket.reset();
}

}  // namespace alltoallv
