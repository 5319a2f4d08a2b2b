#include "transport/tcp/tcp_tree.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "base/error.h"
#include "transport/tcp/tcp_connections.h"

namespace alltoallv {
namespace {

constexpr size_t most_in_star = 32;  // hosts
constexpr size_t fan_in = 16;

}  // namespace

TcpTree::TcpTree(const std::vector<TcpPeer>& peers) : host_of_(peers.size()) {
    for (size_t rank = 0; rank < peers.size(); ++rank) {
        const auto first = static_cast<size_t>(peers[rank].first_on_host);
        if (first == rank) leaders_.push_back(static_cast<int>(rank));
        host_of_[rank] = first == rank ? static_cast<int>(leaders_.size()) - 1 : host_of_[first];
    }
    fan_in_ = leaders_.size() <= most_in_star ? most_in_star : fan_in;
}

std::vector<int> TcpTree::neighbours(int host) const {
    std::vector<int> hosts;
    if (host > 0) hosts.push_back(parent(host));
    for (int other = host + 1; other < static_cast<int>(leaders_.size()); ++other)
        if (parent(other) == host) hosts.push_back(other);
    return hosts;
}

int TcpTree::towards(int from, int to) const {
    for (int host = to; host > from; host = parent(host))
        if (parent(host) == from) return host;
    return parent(from);
}

void connect_tree(TcpMembership& membership, const TcpMeetingOptions& options) {
    const TcpTree tree(membership.peers);
    const int host = tree.host_of(options.rank);
    if (!tree.deep() || tree.leader(host) != options.rank) return;
    const auto deadline = std::chrono::steady_clock::now() +
                          std::chrono::milliseconds(static_cast<int64_t>(std::min(options.timeout, 1e6) * 1000));
    const auto transfer = [&](auto&& function, int rank, auto* data) {
        if (!function(membership.sockets[static_cast<size_t>(rank)].get(), data))
            throw peer_lost("rank " + std::to_string(rank) + " left or was silent while joining domain '" +
                            options.domain + "'");
    };
    const auto send = [](int socket, const std::string* card) { return send_all(socket, card->data(), card->size()); };
    const auto receive = [&](int socket, std::string* card) {
        return receive_all(socket, card->data(), card->size(), deadline);
    };
    TcpConnectionsOptions connections;
    connections.rank = options.rank;
    connections.secret = options.key;
    connections.peers.emplace_back();
    for (const int other : tree.neighbours(host))
        if (host > 0 && other > 0) connections.peers[0].push_back(tree.leader(other));
    connections.timeout = options.timeout;
    connections.poll = [&] {
        if (options.poll) options.poll();
        char byte;
        if (tree.parent(host) == 0 && ::recv(membership.sockets[0].get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0)
            throw peer_lost("rank 0 left while joining domain '" + options.domain + "'");
    };
    // Over the connections to rank 0, which gives each leader the card of its parent.
    connections.gather = [&](const std::string& mine) {
        std::vector<std::string> cards(membership.peers.size());
        cards[static_cast<size_t>(options.rank)] = mine;
        const auto card_at = [&](int rank) {
            std::string& card = cards[static_cast<size_t>(rank)];
            card.resize(card_bytes);
            return &card;
        };
        if (host > 0) {
            transfer(send, 0, card_at(options.rank));
            if (tree.parent(host) > 0) transfer(receive, 0, card_at(tree.leader(tree.parent(host))));
            return cards;
        }
        std::vector<int> others;
        for (int rank = 1; rank < static_cast<int>(cards.size()); ++rank)
            if (tree.leader(tree.host_of(rank)) == rank) others.push_back(rank);
        for (const int rank : others) transfer(receive, rank, card_at(rank));
        for (const int rank : others)
            if (const int parent = tree.parent(tree.host_of(rank)); parent > 0)
                transfer(send, rank, card_at(tree.leader(parent)));
        return cards;
    };
    std::vector<UniqueFd> made = std::move(connect_ranks(connections)[0]);
    membership.sockets.resize(made.size());
    for (const int rank : connections.peers[0]) {
        UniqueFd& socket = made[static_cast<size_t>(rank)];
        (void)::fcntl(socket.get(), F_SETFL, 0);  // blocks, as the others
        membership.sockets[static_cast<size_t>(rank)] = std::move(socket);
    }
}

}  // namespace alltoallv
