#include "runtime/hosts/tcp_pending.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "runtime/base/resources.h"
#include "runtime/hosts/tcp_socket.h"

namespace alltoallv {
namespace {

constexpr double patience = 3.0;      // seconds for the whole message
constexpr double silence = 0.2;       // seconds after which its descriptor may be taken away
constexpr size_t most_pending = 512;  // at once; further ones replace the oldest
constexpr int most_accepts = 64;      // before present ones are served again

/// Returns false once the other end has closed it.
bool receive(PendingConnection& connection, size_t bytes) {
    const size_t had = connection.rx_buffer.size();
    connection.rx_buffer.resize(bytes);
    const ssize_t got = ::recv(connection.socket.get(), connection.rx_buffer.data() + had, bytes - had, MSG_DONTWAIT);
    const int error = errno;
    connection.rx_buffer.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    return got > 0 || (got < 0 && (error == EAGAIN || error == EINTR));
}

}  // namespace

std::vector<PendingConnection> PendingConnections::next(int wait_ms) {
    std::vector<pollfd> ready{{listener_, POLLIN, 0}};
    for (const PendingConnection& connection : pending_) ready.push_back({connection.socket.get(), POLLIN, 0});
    if (::poll(ready.data(), ready.size(), wait_ms) < 0) return {};
    std::vector<PendingConnection> complete, waiting;
    const auto now = Clock::now();
    for (size_t i = 0; i < pending_.size(); ++i) {
        if ((ready[i + 1].revents != 0 && !receive(pending_[i], bytes_)) || now >= pending_[i].until) continue;
        (pending_[i].rx_buffer.size() == bytes_ ? complete : waiting).push_back(std::move(pending_[i]));
    }
    pending_ = std::move(waiting);
    if (ready[0].revents != 0) accept();
    return complete;
}

void PendingConnections::accept() {
    for (int i = 0; i < most_accepts; ++i) {
        PendingConnection connection{accept_tcp(listener_), {}, after(patience), {}};
        const bool full = !connection.socket && (errno == EMFILE || errno == ENFILE);
        if (full && pending_.empty()) throw ran_out("cannot accept a connection", errno);
        if (full && seconds_since(pending_.front().accepted_at) < silence)
            return;  // most likely it is about to introduce itself
        if (full || pending_.size() == most_pending) pending_.erase(pending_.begin());
        if (!connection.socket) return;
        if (challenges_) {
            connection.challenge = random_digest();
            if (!send_all(connection.socket.get(), connection.challenge.data(), connection.challenge.size())) continue;
        }
        pending_.push_back(std::move(connection));
    }
}

}  // namespace alltoallv
