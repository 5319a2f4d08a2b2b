/// \file bootstrap.cpp
/// \brief Entry of the bootstrap of processes, and the peers' half of it.
#include "bootstrap/bootstrap.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "bootstrap/bootstrap_protocol.h"
#include "bootstrap/bootstrap_rendezvous.h"
#include "bootstrap/unix_socket.h"

namespace alltoallv {

namespace {

/// One rank other than 0, from looking for the root to holding everything.
class Joiner {
  public:
    explicit Joiner(const BootstrapOptions& options) : options_(options), patience_(options) {
        membership_.peers.resize(static_cast<size_t>(options.size));
    }

    Membership run() {
        while (!welcome_) find_root();
        try {
            while (!committed_) {
                Message message;
                if (!next(message)) throw root_lost();
                hear(message);
                if (controlled_ && missing_sockets_ == 0) confirm();
            }
        } catch (const Error& error) {
            tell_root(error);
            throw;
        } catch (...) {
            tell_root(gave_up_error(options_));
            throw;
        }
        root().pidfd = std::move(root_pidfd_);
        return std::move(membership_);
    }

  private:
    /// Connects to the root, retrying until it has come, and says hello. Returns with `welcome_` unset when that
    /// connection led nowhere (for instance to a root that had just stopped listening).
    void find_root() {
        for (int pause_ms = 1; !connect_once(); pause_ms = std::min(2 * pause_ms, 20)) {
            pause(pause_ms);
        }
        Message message;
        if (try_send(socket_.get(), encode_hello(hello_of(options_))) == IoStatus::done && next(message)) {
            hear(message);
        } else {
            pause(1);
        }
    }

    void pause(int pause_ms) {
        patience_.tick();
        if (patience_.expired()) {
            throw comm_timeout("rank 0 had not opened " + describe(options_) + " after " +
                               seconds_text(options_.timeout));
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(patience_.slice_ms(pause_ms)));
    }

    bool connect_once() {
        for (int attempt = 0; attempt < name_attempts; ++attempt) {
            Connection connection = connect_abstract(socket_name(options_, attempt));
            if (connection.error != 0) continue;
            const Credentials listener = peer_credentials(connection.socket.get());
            if (listener.uid != geteuid()) continue;  // an impostor: not a byte for it
            root_pidfd_ = open_pidfd(listener.pid);
            if (!is_alive(listener.pid, root_pidfd_)) continue;
            socket_ = std::move(connection.socket);
            root().pid = listener.pid;
            return true;
        }
        return false;
    }

    /// Waits for the root's next message. False when the root is gone.
    bool next(Message& message) {
        while (true) {
            const bool ended = has_ended(root_pidfd_);  // asked first: what it had sent before it ended still counts
            const IoStatus status = try_receive(socket_.get(), message);
            if (status != IoStatus::again) return status == IoStatus::done;
            if (ended) return false;
            patience_.tick();
            if (patience_.expired()) ask_for_reason();
            pollfd items[] = {{socket_.get(), POLLIN, 0}, {root_pidfd_.get(), POLLIN, 0}};
            ::poll(items, 2, std::max(1, patience_.slice_ms()));
        }
    }

    /// Our time is up. The root knows who is absent and then tells everybody; it gets a second to answer.
    void ask_for_reason() {
        const auto now = std::chrono::steady_clock::now();
        if (!asked_) {
            asked_ = true;
            give_up_at_ = now + std::chrono::seconds(1);
            const double ms = std::min(std::ceil(options_.timeout * 1000), 2e9);
            try_send(socket_.get(), encode(MessageKind::expired, static_cast<int32_t>(ms)));
        } else if (now >= give_up_at_) {
            throw comm_timeout("after " + seconds_text(options_.timeout) + " rank 0 (pid " +
                               std::to_string(root().pid) + ") had not answered while opening " + describe(options_));
        }
    }

    void hear(Message& message) {
        const std::optional<Packet> packet = decode(message.data);
        const MessageKind kind = packet ? packet->kind : MessageKind::hello;
        if (kind == MessageKind::failure) {
            root_knows_ = true;
            throw decode_failure(*packet);
        } else if (kind == MessageKind::welcome && !welcome_) {
            welcome_ = true;
        } else if (kind == MessageKind::table && !controlled_ && message.fds.size() == 1) {
            take_table(*packet, std::move(message.fds[0]));
        } else if (kind == MessageKind::pair && packet->value >= 0 && packet->value < options_.size &&
                   packet->value != options_.rank && message.fds.size() == 1) {
            membership_.peers[static_cast<size_t>(packet->value)].socket = std::move(message.fds[0]);
            --missing_sockets_;
        } else if (kind == MessageKind::commit && confirmed_) {
            committed_ = true;
        } else {
            throw backend_unavailable("rank 0 (pid " + std::to_string(root().pid) + ") sent an unexpected message to " +
                                      "rank " + std::to_string(options_.rank) + " while opening " + describe(options_));
        }
    }

    void take_table(const Packet& packet, UniqueFd control) {
        std::vector<pid_t> pids(membership_.peers.size());
        struct stat status{};
        const int seals = ::fcntl(control.get(), F_GET_SEALS);
        const bool sound = packet.body.size() == pids.size() * sizeof(pid_t) && ::fstat(control.get(), &status) == 0 &&
                           seals >= 0 && (seals & F_SEAL_SHRINK) != 0 &&
                           static_cast<size_t>(status.st_size) == options_.control_bytes;
        if (!sound) throw backend_unavailable("rank 0 sent a malformed control segment for " + describe(options_));
        std::memcpy(pids.data(), packet.body.data(), packet.body.size());
        // The kernel told us the root's pid and we know our own: the root must see the same numbers.
        const auto self = static_cast<size_t>(options_.rank);
        if (pids[0] != root().pid || pids[self] != getpid()) {
            throw backend_unavailable("rank 0 and rank " + std::to_string(options_.rank) + " of " + describe(options_) +
                                      " run in different pid namespaces");
        }
        for (size_t rank = 0; rank < pids.size(); ++rank) membership_.peers[rank].pid = pids[rank];
        membership_.control = std::move(control);
        controlled_ = true;
    }

    /// The pids are still those of our peers: a peer that ends before the commit makes the root fail everybody.
    void confirm() {
        if (std::exchange(confirmed_, true)) return;
        for (int rank = 1; rank < options_.size; ++rank) {
            Peer& peer = membership_.peers[static_cast<size_t>(rank)];
            if (rank != options_.rank) peer.pidfd = open_pidfd(peer.pid);
        }
        if (try_send(socket_.get(), encode(MessageKind::ack)) == IoStatus::closed) return;  // next() reads the reason
    }

    void tell_root(const Error& error) {
        if (!root_knows_ && !asked_) try_send(socket_.get(), encode_failure(error, options_));
    }

    Error root_lost() {
        return peer_lost("rank 0 (pid " + std::to_string(root().pid) + ") ended or left while opening " +
                         describe(options_));
    }

    Peer& root() { return membership_.peers[0]; }

    const BootstrapOptions& options_;
    Patience patience_;
    Membership membership_;
    UniqueFd socket_, root_pidfd_;
    int missing_sockets_ = options_.size - 1;
    bool welcome_ = false, controlled_ = false, confirmed_ = false, committed_ = false;
    bool asked_ = false, root_knows_ = false;
    Patience::TimePoint give_up_at_;
};

// FNV-1a over length-prefixed fields, with a final mix.
class NameHash {
  public:
    void add(std::string_view text) {
        add(text.size());
        for (const char c : text) step(static_cast<unsigned char>(c));
    }
    void add(uint64_t number) {
        for (int shift = 0; shift < 64; shift += 8) step((number >> shift) & 0xff);
    }
    std::string hex() const {
        uint64_t mixed = state_ ^ (state_ >> 31);
        mixed *= 0x9e3779b97f4a7c15;
        mixed ^= mixed >> 29;
        std::string text;
        for (int shift = 60; shift >= 0; shift -= 4) text += "0123456789abcdef"[(mixed >> shift) & 15];
        return text;
    }

  private:
    void step(uint64_t byte) { state_ = (state_ ^ byte) * 0x100000001b3; }

    uint64_t state_ = 0xcbf29ce484222325;
};

}  // namespace

std::string socket_name(const BootstrapOptions& options, int attempt) {
    NameHash hash;
    hash.add(uint64_t{geteuid()});
    hash.add(std::string_view(options.job));
    hash.add(std::string_view(options.domain));
    hash.add(static_cast<uint64_t>(attempt));
    return "alltoallv-" + hash.hex();
}

UniqueFd open_pidfd(pid_t pid) {
#ifndef SYS_pidfd_open
    constexpr long SYS_pidfd_open = 434;  // the same on every architecture
#endif
    return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));  // always close-on-exec
}

bool has_ended(const UniqueFd& pidfd) {
    pollfd item{pidfd.get(), POLLIN, 0};  // a negative descriptor is ignored
    return ::poll(&item, 1, 0) > 0;
}

bool is_alive(pid_t pid, const UniqueFd& pidfd) {
    if (pidfd) return !has_ended(pidfd);
    return pid == 0 || ::kill(pid, 0) == 0 || errno != ESRCH;
}

Membership join_domain(const BootstrapOptions& options) {
    return Joiner(options).run();
}

Membership bootstrap_processes(const BootstrapOptions& options) {
    check_options(options);
    return options.rank == 0 ? open_domain(options) : join_domain(options);
}

}  // namespace alltoallv
