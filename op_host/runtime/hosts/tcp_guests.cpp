#include "runtime/hosts/tcp_guests.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "runtime/base/resources.h"
#include "runtime/hosts/tcp_socket.h"

namespace alltoallv {
namespace {

constexpr double patience = 3.0;     // seconds for the whole message
constexpr double silence = 0.2;      // seconds after which its descriptor may be taken away
constexpr size_t most_guests = 512;  // at once; further ones replace the oldest
constexpr int most_accepts = 64;     // before present guests are served again

/// Returns false once the guest has closed the connection.
bool hear(TcpGuest& guest, size_t bytes) {
    const size_t had = guest.heard.size();
    guest.heard.resize(bytes);
    const ssize_t got = ::recv(guest.socket.get(), guest.heard.data() + had, bytes - had, MSG_DONTWAIT);
    const int error = errno;
    guest.heard.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    return got > 0 || (got < 0 && (error == EAGAIN || error == EINTR));
}

}  // namespace

std::vector<TcpGuest> TcpGuests::next(int wait_ms) {
    std::vector<pollfd> ready{{listener_, POLLIN, 0}};
    for (const TcpGuest& guest : guests_) ready.push_back({guest.socket.get(), POLLIN, 0});
    if (::poll(ready.data(), ready.size(), wait_ms) < 0) return {};
    std::vector<TcpGuest> complete, waiting;
    const auto now = Clock::now();
    for (size_t i = 0; i < guests_.size(); ++i) {
        if ((ready[i + 1].revents != 0 && !hear(guests_[i], bytes_)) || now >= guests_[i].until) continue;
        (guests_[i].heard.size() == bytes_ ? complete : waiting).push_back(std::move(guests_[i]));
    }
    guests_ = std::move(waiting);
    if (ready[0].revents != 0) accept();
    return complete;
}

void TcpGuests::accept() {
    for (int i = 0; i < most_accepts; ++i) {
        TcpGuest guest{accept_tcp(listener_), {}, after(patience), {}};
        const bool full = !guest.socket && (errno == EMFILE || errno == ENFILE);
        if (full && guests_.empty()) throw ran_out("cannot accept a connection", errno);
        if (full && seconds_since(guests_.front().came) < silence)
            return;  // most likely it is about to introduce itself
        if (full || guests_.size() == most_guests) guests_.erase(guests_.begin());
        if (!guest.socket) return;
        if (challenges_) {
            guest.challenge = random_digest();
            if (!send_all(guest.socket.get(), guest.challenge.data(), guest.challenge.size())) continue;
        }
        guests_.push_back(std::move(guest));
    }
}

}  // namespace alltoallv
