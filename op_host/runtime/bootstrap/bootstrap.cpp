// Starts the bootstrap of processes, and contains the peers' half of it.
#include "runtime/bootstrap/bootstrap.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <set>
#include <thread>
#include <vector>

#include "runtime/base/place.h"
#include "runtime/base/seconds_text.h"
#include "runtime/base/sha256.h"
#include "runtime/bootstrap/bootstrap_protocol.h"
#include "runtime/bootstrap/bootstrap_rendezvous.h"
#include "runtime/bootstrap/unix_socket.h"
#include "runtime/bootstrap/without_descriptors.h"

namespace alltoallv {

namespace {

/// A rank other than 0, from the search for the root until it holds everything.
class Joiner {
  public:
    explicit Joiner(const BootstrapOptions& options) : options_(options), patience_(options) {
        membership_.peers.resize(static_cast<size_t>(options.size));
    }

    Membership run() {
        try {
            (void)this_place();  // what the communicator reads later, when nobody could be told that it failed
            while (!welcome_) find_root();
        } catch (const Error& error) {
            if (!root_knows_) tell_apart(options_, error, join_domain);
            throw;
        }
        try {
            if (options_.failure) throw *options_.failure;
            while (!committed_) {
                Message message;
                if (!next(message)) throw root_lost();
                hear(message);
                if (membership_.memory && missing_sockets_ == 0) confirm();
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
    /// Who listens on a name; it is the root if it answers.
    struct Candidate {
        std::string name;
        pid_t pid = 0;
        UniqueFd socket, pidfd;
    };

    /// Connects to the root, retrying until it has come, and sends a hello. Returns with `welcome_` unset if that
    /// connection failed (for instance, because a root had just stopped listening), or has not been answered for long:
    /// then the root may have another name.
    void find_root() {
        // The root of a job that makes many groups is only a moment late.
        bool connected = connect_once();
        for (int yields = 0; yields < first_yields && !connected; ++yields) {
            sched_yield();
            connected = connect_once();
        }
        Message message;
        for (const auto since = Clock::now(); !connected; connected = connect_once()) {
            const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - since);
            if (hears_silent(message)) return hear(message);
            pause(std::clamp(waited / 8, shortest_pause, longest_pause));  // then it is at most an eighth late itself
        }
        if (try_send(candidate_.socket.get(), encode_hello(options_)) == IoStatus::done && is_answered(message))
            hear(message);
        else
            pause(std::chrono::milliseconds(1));
    }

    /// Waits until the candidate, or one that was silent before, has answered as the root may do: it is the root. False
    /// if the candidate is none, or still silent.
    bool is_answered(Message& message) {
        const auto end = Clock::now() + silence;
        for (;;) {
            const bool ended = has_ended(candidate_.pidfd);  // checked first: what it sent before it ended still counts
            if (const auto answer = answer_of(candidate_, message)) return *answer && become_root(candidate_);
            if (ended) return false;
            if (hears_silent(message)) return true;
            if (Clock::now() >= end) {
                silent_.push_back(std::move(candidate_));
                return false;
            }
            patience_.tick();
            if (patience_.expired()) {
                (void)become_root(candidate_);
                while (next(message)) {  // asks it for the reason
                    const std::optional<Packet> packet = decode(message.data);
                    if (packet && packet->kind == MessageKind::failure) return true;
                }
                return false;
            }
            std::vector<pollfd> items{{candidate_.socket.get(), POLLIN, 0}, {candidate_.pidfd.get(), POLLIN, 0}};
            for (const Candidate& one : silent_) items.push_back({one.socket.get(), POLLIN, 0});
            ::poll(items.data(), items.size(), std::max(1, patience_.slice_ms()));
        }
    }

    /// Returns whether the answer is one that the root may have sent; nothing if there is none yet.
    static std::optional<bool> answer_of(const Candidate& of, Message& message) {
        try {
            const IoStatus status = try_receive(of.socket.get(), message);
            if (status == IoStatus::again) return std::nullopt;
            const std::optional<Packet> packet = decode(message.data);
            return status == IoStatus::done && packet &&
                   (packet->kind == MessageKind::welcome || packet->kind == MessageKind::failure);
        } catch (const Error&) {
            return false;
        }
    }

    /// True if one that was silent has answered: it is the root.
    bool hears_silent(Message& message) {
        for (Candidate& one : silent_) {
            const auto answer = answer_of(one, message);
            if (answer && *answer) return become_root(one);
            if (answer || has_ended(one.pidfd)) one.socket.reset();
        }
        std::erase_if(silent_, [](const Candidate& one) { return !one.socket; });
        return false;
    }

    bool become_root(Candidate& from) {
        root().pid = from.pid;
        socket_ = std::move(from.socket);
        root_pidfd_ = std::move(from.pidfd);
        return true;
    }

    void pause(std::chrono::microseconds length) {
        patience_.tick();
        if (patience_.expired()) {
            if (!silent_.empty()) throw unanswered(silent_[0].pid);
            throw unopened(options_.timeout);
        }
        patience_.warn([this](double seconds) { return unopened(seconds); });
        std::this_thread::sleep_for(
            std::min<std::chrono::microseconds>(length, std::chrono::milliseconds(patience_.slice_ms())));
    }

    bool connect_once() {
        for (int attempt = 0; attempt < name_attempts; ++attempt)
            if (connect_to(socket_name(options_, attempt))) return true;
        if (++rounds_ % rounds_per_look != 0) return false;
        const std::string prefix = "@" + found_name_prefix(options_);
        std::set<std::string> names;
        std::ifstream sockets("/proc/net/unix");
        for (std::string line; std::getline(sockets, line);) {
            const size_t at = line.find(prefix);
            if (at != std::string::npos) names.insert(line.substr(at + 1));
        }
        return std::any_of(names.begin(), names.end(), [this](const std::string& name) { return connect_to(name); });
    }

    bool connect_to(const std::string& name) {
        if (std::ranges::any_of(silent_, [&](const Candidate& one) { return one.name == name; })) return false;
        Connection connection = connect_abstract(name);
        if (connection.error != 0) return false;
        const Credentials listener = peer_credentials(connection.socket.get());
        if (listener.uid != geteuid()) return false;  // an impostor: send it nothing
        UniqueFd pidfd = open_pidfd(listener.pid);
        if (!is_alive(listener.pid, pidfd)) return false;
        Candidate candidate{name, listener.pid, std::move(connection.socket), std::move(pidfd)};
        if (silent_.empty()) {
            candidate_ = std::move(candidate);
            return true;
        }
        // All others at once, beside those that are silent.
        if (try_send(candidate.socket.get(), encode_hello(options_)) == IoStatus::done)
            silent_.push_back(std::move(candidate));
        return false;
    }

    /// Waits for the root's next message. Returns false when the root is gone.
    bool next(Message& message) {
        while (true) {
            const bool ended = has_ended(root_pidfd_);  // checked first: what it sent before it ended still counts
            const IoStatus status = try_receive(socket_.get(), message);
            if (status != IoStatus::again) return status == IoStatus::done;
            if (ended) return false;
            patience_.tick();
            if (patience_.expired()) ask_for_reason();
            pollfd items[] = {{socket_.get(), POLLIN, 0}, {root_pidfd_.get(), POLLIN, 0}};
            ::poll(items, 2, std::max(1, patience_.slice_ms()));
        }
    }

    /// This rank's time is over. The root knows who is absent and informs all ranks; it gets a second to answer.
    void ask_for_reason() {
        const auto now = Clock::now();
        if (!asked_) {
            asked_ = true;
            give_up_at_ = now + std::chrono::seconds(1);
            const double ms = std::min(std::ceil(options_.timeout * 1000), 2e9);
            try_send(socket_.get(), encode(MessageKind::expired, static_cast<int32_t>(ms)));
        } else if (now >= give_up_at_) {
            throw unanswered(root().pid);
        }
    }

    Error unopened(double seconds) const {
        return comm_timeout(4002, "rank ", name_of(options_, 0), " had not opened ", describe(options_), " after ",
                            seconds_text(seconds), options_.cure);
    }

    Error unanswered(pid_t pid) const {
        return comm_timeout(4003, "after ", seconds_text(options_.timeout), " rank ", name_of(options_, 0), " (pid ",
                            pid, ") had not answered while opening ", describe(options_));
    }

    void hear(Message& message) {
        const std::optional<Packet> packet = decode(message.data);
        const MessageKind kind = packet ? packet->kind : MessageKind::hello;
        if (kind == MessageKind::failure) {
            root_knows_ = true;
            throw decode_failure(*packet);
        } else if (kind == MessageKind::welcome && !welcome_) {
            welcome_ = true;
        } else if (kind == MessageKind::table && !membership_.memory && message.fds.size() == 1) {
            take_table(*packet, message.fds[0]);
        } else if (kind == MessageKind::pair && packet->value >= 0 && packet->value < options_.size &&
                   packet->value != options_.rank && message.fds.size() == 1) {
            membership_.peers[static_cast<size_t>(packet->value)].socket = std::move(message.fds[0]);
            --missing_sockets_;
        } else if (kind == MessageKind::commit && confirmed_) {
            committed_ = true;
        } else {
            throw backend_unavailable(5011, "rank 0 (pid ", root().pid, ") sent an unexpected message to rank ",
                                      options_.rank, " while opening ", describe(options_));
        }
    }

    void take_table(const Packet& packet, const UniqueFd& control) {
        std::vector<pid_t> pids(membership_.peers.size());
        struct stat status{};
        const int seals = ::fcntl(control.get(), F_GET_SEALS);
        const bool sound = packet.body.size() == pids.size() * sizeof(pid_t) && ::fstat(control.get(), &status) == 0 &&
                           seals >= 0 && (seals & F_SEAL_SHRINK) != 0 &&
                           static_cast<size_t>(status.st_size) == options_.control_bytes;
        if (!sound) throw backend_unavailable(5012, "rank 0 sent a malformed control segment for ", describe(options_));
        std::memcpy(pids.data(), packet.body.data(), packet.body.size());
        // The kernel gives the root's pid, and this rank knows its own: the root must see the same numbers.
        const auto self = static_cast<size_t>(options_.rank);
        if (pids[0] != root().pid || pids[self] != getpid()) {
            throw backend_unavailable(5013, "rank 0 and rank ", options_.rank, " of ", describe(options_),
                                      different_namespaces);
        }
        for (size_t rank = 0; rank < pids.size(); ++rank) membership_.peers[rank].pid = pids[rank];
        membership_.memory = std::make_shared<Mapping>(control.get(), options_.control_bytes);
    }

    /// Checks that the pids still belong to the peers: if a peer ends before the commit, the root fails all ranks.
    void confirm() {
        if (std::exchange(confirmed_, true)) return;
        for (int rank = 1; rank < options_.size; ++rank) {
            Peer& peer = membership_.peers[static_cast<size_t>(rank)];
            if (rank != options_.rank) peer.pidfd = open_pidfd(peer.pid);
        }
        try_send(socket_.get(), encode(MessageKind::ack));  // if the root is gone, next() reads the reason
    }

    void tell_root(const Error& error) {
        if (!root_knows_ && !asked_) try_send(socket_.get(), encode_failure(error, options_));
    }

    Error root_lost() {
        return peer_lost(4004, "rank ", name_of(options_, 0), " (pid ", root().pid, ") ended or left while opening ",
                         describe(options_));
    }

    Peer& root() { return membership_.peers[0]; }

    static constexpr std::chrono::microseconds shortest_pause{100}, longest_pause = std::chrono::milliseconds(20);
    static constexpr int rounds_per_look = 16;
    static constexpr int first_yields = 10;

    const BootstrapOptions& options_;
    Patience patience_;
    Membership membership_;
    UniqueFd socket_, root_pidfd_;  ///< of the root
    Candidate candidate_;
    std::vector<Candidate> silent_;
    int rounds_ = 0;  ///< attempts to find the names
    int missing_sockets_ = options_.size - 1;
    bool welcome_ = false, confirmed_ = false, committed_ = false;
    bool asked_ = false, root_knows_ = false;
    Clock::time_point give_up_at_;
};

/// The kernel shows all users that a user namespace lacks as one, so members cannot be told from strangers.
void check_user() {
    static const uid_t overflow = [] {
        uid_t uid = 65534;
        std::ifstream("/proc/sys/kernel/overflowuid") >> uid;
        return uid;
    }();
    if (geteuid() != overflow) return;
    uint64_t inside = 0, outside = 0, count = 0;
    std::ifstream("/proc/self/uid_map") >> inside >> outside >> count;
    if (inside == 0 && count == 0xffffffff) return;  // not in such a namespace: the user is an ordinary one
    throw backend_unavailable(5014, "this process runs as uid ", overflow,
                              " in a user namespace, where every user that the namespace does not have looks like that:"
                              " ranks cannot tell each other from strangers; run them as a user that it maps");
}

}  // namespace

std::string socket_name(const BootstrapOptions& options, int attempt) {
    std::string text = std::to_string(geteuid()) + " " + std::to_string(attempt);
    for (const std::string& part : {options.job, options.domain})
        text += " " + std::to_string(part.size()) + " " + part;
    return "alltoallv-" + hex(hmac_sha256(options.secret, text)).substr(0, 32);
}

std::string found_name_prefix(const BootstrapOptions& options) {
    return socket_name(options, name_attempts) + "-";
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
    if (options.size > 1) check_user();
    return options.rank == 0 ? open_domain(options) : join_domain(options);
}

}  // namespace alltoallv
