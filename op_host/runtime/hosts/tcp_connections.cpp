#include "runtime/hosts/tcp_connections.h"

#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <sstream>

#include "runtime/base/error.h"
#include "runtime/base/sha256.h"
#include "runtime/hosts/tcp_pending.h"
#include "runtime/hosts/tcp_socket.h"

namespace alltoallv {
namespace {

constexpr int wait_ms = 10;
constexpr double connect_seconds = 3.0;

/// The first message to a lower rank, which has given every rank its challenge.
struct Hello {
    int32_t rank = -1;
    uint32_t kind = 0;
    Digest proof{};
};

Digest prove(const std::string& secret, const std::string& challenge, const Hello& hello) {
    return hmac_sha256(secret, challenge + " " + std::to_string(hello.rank) + " " + std::to_string(hello.kind));
}

}  // namespace

std::string card_of(int port) {
    std::string card = std::to_string(port) + " " + hex(random_digest());
    for (const std::string& address : own_addresses())
        if (card.size() + 1 + address.size() < card_bytes) card += " " + address;
    card.resize(card_bytes, '\0');
    return card;
}

std::vector<std::string> words_of(const std::string& card) {
    std::istringstream text(card.c_str());  // without the padding
    return {std::istream_iterator<std::string>(text), {}};
}

std::vector<std::vector<UniqueFd>> connect_ranks(const TcpConnectionsOptions& options) {
    const UniqueFd listener = listen_tcp(0);
    const std::vector<std::string> cards = options.gather(card_of(port_of(listener.get())));
    const std::string own_challenge = words_of(cards[static_cast<size_t>(options.rank)]).at(1);
    std::vector<std::vector<UniqueFd>> made(options.peers.size());
    for (auto& sockets : made) sockets.resize(cards.size());
    const auto deadline = after(options.timeout);
    const auto give_up = [&](int rank) {
        if (options.poll) options.poll();
        if (Clock::now() > deadline)
            throw comm_timeout(4025, "rank ", options.rank, " found no way to rank ", rank,
                               ", which is on another host");
    };
    // Connect to every lower rank, accept from every higher one.
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
            hello.proof = prove(options.secret, words.at(1), hello);
            if (!send_all(socket.get(), &hello, sizeof hello)) throw peer_lost(4026, "rank ", rank, " hung up");
        }
    const auto absent = [&] {
        for (size_t kind = 0; kind < made.size(); ++kind)
            for (const int rank : options.peers[kind])
                if (rank > options.rank && !made[kind][static_cast<size_t>(rank)]) return rank;
        return -1;
    };
    PendingConnections pending(listener.get(), sizeof(Hello), false);
    for (int next; (next = absent()) >= 0;) {
        give_up(next);
        for (PendingConnection& connection : pending.next(wait_ms)) {
            Hello hello;
            std::memcpy(&hello, connection.rx_buffer.data(), sizeof hello);
            const bool belongs = equal(hello.proof, prove(options.secret, own_challenge, hello)) &&
                                 hello.rank > options.rank && static_cast<size_t>(hello.rank) < cards.size() &&
                                 hello.kind < made.size() && !made[hello.kind][static_cast<size_t>(hello.rank)];
            if (belongs) made[hello.kind][static_cast<size_t>(hello.rank)] = std::move(connection.socket);
        }
    }
    for (auto& sockets : made)
        for (const UniqueFd& socket : sockets)
            if (socket) (void)::fcntl(socket.get(), F_SETFL, O_NONBLOCK);
    return made;
}

}  // namespace alltoallv
