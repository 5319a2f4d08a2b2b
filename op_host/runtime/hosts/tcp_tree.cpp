#include "runtime/hosts/tcp_tree.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/base/error.h"
#include "runtime/hosts/tcp_connections.h"

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
    std::vector<int> found;
    if (host > 0) found.push_back(parent(host));
    const int64_t first = int64_t{host} * static_cast<int64_t>(fan_in_) + 1;
    for (int64_t other = first; other < std::min<int64_t>(first + static_cast<int64_t>(fan_in_), hosts()); ++other)
        found.push_back(static_cast<int>(other));
    return found;
}

int TcpTree::towards(int from, int to) const {
    for (int host = to; host > from; host = parent(host))
        if (parent(host) == from) return host;
    return parent(from);
}

void connect_tree(TcpMembership& membership, const TcpJoinOptions& options) {
    const TcpTree tree(membership.peers);
    const int host = tree.host_of(options.rank);
    if (!tree.deep() || tree.leader(host) != options.rank) return;
    const auto deadline = after(options.timeout);
    const auto socket_of = [&](int rank) { return membership.sockets[static_cast<size_t>(rank)].get(); };
    const auto lost = [&](int rank) {
        return peer_lost(4036, "rank ", rank, " left or was silent while joining domain '", options.domain, "'");
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
        if (tree.parent(host) == 0 && ::recv(socket_of(0), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) throw lost(0);
    };
    // Over the connections to rank 0, which gives each leader the card of its parent.
    connections.gather = [&](const std::string& own_card) {
        std::vector<std::string> cards(membership.peers.size(), std::string(card_bytes, '\0'));
        const auto card_of = [&](int rank) -> std::string& { return cards[static_cast<size_t>(rank)]; };
        const auto send = [&](int to, int whose) {
            if (!send_all(socket_of(to), card_of(whose).data(), card_bytes)) throw lost(to);
        };
        const auto receive = [&](int from, int whose) {
            if (!receive_all(socket_of(from), card_of(whose).data(), card_bytes, deadline)) throw lost(from);
        };
        const auto parent_of = [&](int rank) { return tree.leader(tree.parent(tree.host_of(rank))); };
        card_of(options.rank) = own_card;
        if (host > 0) {
            send(0, options.rank);
            if (parent_of(options.rank) > 0) receive(0, parent_of(options.rank));
            return cards;
        }
        for (int other = 1; other < tree.hosts(); ++other) receive(tree.leader(other), tree.leader(other));
        for (int other = 1; other < tree.hosts(); ++other)
            if (const int rank = tree.leader(other); parent_of(rank) > 0) send(rank, parent_of(rank));
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
