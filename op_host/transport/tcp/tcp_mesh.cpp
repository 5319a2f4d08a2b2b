#include "transport/tcp/tcp_mesh.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"

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
