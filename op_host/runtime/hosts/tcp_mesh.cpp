#include "runtime/hosts/tcp_mesh.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "runtime/base/error.h"

namespace alltoallv {
namespace {

constexpr int poll_ms = 10;
constexpr size_t most_at_once = size_t{1} << 20;

}  // namespace

TcpMesh::TcpMesh(std::vector<UniqueFd> sockets) {
    for (UniqueFd& socket : sockets) connections_.push_back({std::move(socket)});
}

void TcpMesh::begin(std::span<const Outgoing> out, std::span<const Incoming> in) {
    for (const Outgoing& piece : out) connections_[static_cast<size_t>(piece.rank)].out = piece;
    for (const Incoming& piece : in) connections_[static_cast<size_t>(piece.rank)].in = piece;
    pending_ = static_cast<size_t>(
        std::count_if(connections_.begin(), connections_.end(), [](const Connection& c) { return c.busy(); }));
    // The kernel sends while the data within this host move.
    for (size_t j = 0; j < connections_.size(); ++j)
        if (connections_[j].busy()) pump(static_cast<int>(j), connections_[j]);
}

/// Moves what is possible without waiting, in both directions by turns, so that neither starves.
void TcpMesh::pump(int rank, Connection& connection) {
    const auto move = [&](auto& piece, auto transfer, int flags) {
        if (piece.bytes == 0) return false;
        const ssize_t n = transfer(connection.socket.get(), piece.data, std::min(piece.bytes, most_at_once), flags);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            throw peer_lost(4033, "the connection to rank ", rank, " has ended");
        if (n < 0) return false;
        piece.data += n;
        piece.bytes -= static_cast<size_t>(n);
        return true;
    };
    for (bool moved = true; moved;) {
        moved = move(connection.out, ::send, MSG_NOSIGNAL);
        moved |= move(connection.in, ::recv, 0);
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
    if (!ready.empty() && ::poll(ready.data(), ready.size(), poll_ms) > 0)
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
