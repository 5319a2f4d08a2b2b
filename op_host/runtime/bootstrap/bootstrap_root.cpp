// The root's half of the bootstrap of processes.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <thread>

#include "runtime/base/place.h"
#include "runtime/base/seconds_text.h"
#include "runtime/base/sha256.h"
#include "runtime/bootstrap/bootstrap_protocol.h"
#include "runtime/bootstrap/bootstrap_rendezvous.h"
#include "runtime/bootstrap/unix_socket.h"
#include "runtime/bootstrap/without_descriptors.h"

namespace alltoallv {

namespace {

constexpr auto stranger_patience = std::chrono::seconds(2);      // time for a new connection to introduce itself
constexpr auto stranger_pause = std::chrono::milliseconds(200);  // after which its descriptor may be taken away
constexpr size_t most_strangers = 512;                           // at once; further ones replace the oldest

/// Admits the peers of one domain and sends them what they need. Never waits for a single connection: every wait is for
/// all of them, so that a silent stranger delays nobody and the end of any member is seen at once. Messages of
/// strangers never end the bootstrap; messages of members may.
class Root {
  public:
    explicit Root(const BootstrapOptions& options)
        : options_(options),
          patience_(options),
          members_(static_cast<size_t>(options.size)),
          failure_(options.failure),
          tell_until_(after(telling)) {
        members_[0].pid = getpid();
    }

    ~Root() { close_door(); }

    Membership run() {
        try {
            (void)this_place();  // what the communicator reads later, when nobody could be told that it failed
            if (options_.size > 1) open();
            while (!waiting_for(&Member::joined).empty()) step();
            if (failure_) throw *failure_;
            close_door();
            strangers_.clear();
            const UniqueFd control = make_control_segment(options_.control_bytes);
            auto memory = std::make_shared<Mapping>(control.get(), options_.control_bytes);
            distribute(control.get());
            while (!waiting_for(&Member::confirmed).empty()) step();
            return commit({std::move(memory), {}});
        } catch (const Error& error) {
            tell_everybody(error);
            close_door();
            if (!failure_ && is_alone() && options_.size > 1) tell_apart(options_, error, open_domain);
            throw;
        } catch (...) {
            tell_everybody(gave_up_error(options_));
            throw;
        }
    }

  private:
    struct Member {
        UniqueFd socket, pidfd;
        UniqueFd link;  ///< kept by the membership; `socket` is only for the bootstrap
        pid_t pid = 0;
        bool joined = false, confirmed = false;
    };

    /// A connection of our user that has not introduced itself yet.
    struct Stranger {
        UniqueFd socket;
        pid_t pid = 0;
        Clock::time_point until;
        Clock::time_point came = Clock::now();
    };

    /// Holds a name, and is asked if it is a root.
    struct Holder {
        UniqueFd asked;
        Clock::time_point since{};  ///< of its silence
    };

    /// True if it answers as a root of this domain does, or may yet do so.
    static bool is_root(Holder& holder, UniqueFd socket) {
        const auto now = Clock::now();
        if (holder.since == Clock::time_point{}) holder.since = now;
        if (!holder.asked) {
            holder.asked = std::move(socket);
            try_send(holder.asked.get(), encode(MessageKind::present));
        }
        try {
            Message message;
            const IoStatus status = try_receive(holder.asked.get(), message);
            if (status != IoStatus::again) holder.asked.reset();
            const std::optional<Packet> packet = decode(message.data);
            if (status == IoStatus::done && packet && packet->kind == MessageKind::present) holder.since = now;
        } catch (const Error&) {
            holder.asked.reset();  // too long for an answer
        }
        return now - holder.since < silence;
    }

    /// Listens on the first free name, or else on an unpredictable one.
    void open() {
        using std::chrono::milliseconds;
        std::array<Clock::time_point, name_attempts> unanswered{};
        std::array<Holder, name_attempts> holders;
        for (int pause_ms = 1;; pause_ms = std::min(2 * pause_ms, 20)) {
            std::string holder;
            for (int attempt = 0; attempt < name_attempts; ++attempt) {
                const std::string name = socket_name(options_, attempt);
                if (holder.empty()) listener_ = listen_abstract(name);
                if (listener_) return;
                Connection connection = connect_abstract(name);
                if (connection.error == 0) {
                    const Credentials credentials = peer_credentials(connection.socket.get());
                    const bool ours = credentials.uid == geteuid();
                    if (!ours || !is_alive(credentials.pid, open_pidfd(credentials.pid))) continue;
                    if (!is_root(holders[static_cast<size_t>(attempt)], std::move(connection.socket))) continue;
                    // Most likely this is an earlier bootstrap of this domain that is just ending.
                    if (holder.empty())
                        holder =
                            "pid " + std::to_string(credentials.pid) + " of this user, which is opening the same one";
                    continue;  // the holders of the next names are asked meanwhile
                }
                if (!holder.empty()) continue;
                if (connection.error != ECONNREFUSED && connection.error != EAGAIN) continue;
                // Bound and silent: it is gone by now, about to listen, or holds the name without answering.
                const auto now = Clock::now();
                Clock::time_point& since = unanswered[static_cast<size_t>(attempt)];
                if (since == Clock::time_point{}) since = now;
                if (now - since < milliseconds(50)) {
                    holder = "a process that does not answer";
                    break;
                }
            }
            if (holder.empty()) {  // others hold all names
                listener_ = listen_abstract(found_name_prefix(options_) + hex(random_digest()).substr(0, 32));
                if (listener_) return;
            }
            patience_.tick();
            if (patience_.expired()) {
                throw comm_timeout(4008, "after ", seconds_text(options_.timeout), " the name of ", describe(options_),
                                   " was still taken by ", holder);
            }
            std::this_thread::sleep_for(milliseconds(patience_.slice_ms(pause_ms)));
        }
    }

    /// Frees the name, so that the domain can be made again. A child that was forked meanwhile also holds the socket,
    /// so closing it is not enough to refuse new connections.
    void close_door() {
        if (listener_) ::shutdown(listener_.get(), SHUT_RDWR);
        listener_.reset();
    }

    /// Waits until anything happens, at most `limit_ms`, and handles it.
    void step(int limit_ms = 50) {
        check_time();
        // Only what is open: the kernel refuses more entries than a process may have descriptors.
        std::vector<pollfd> items{{listener_.get(), POLLIN, 0}};
        std::vector<int> members;  // after the listener
        for (int rank = 1; rank < options_.size; ++rank) {
            const Member& member = members_[static_cast<size_t>(rank)];
            for (const UniqueFd* fd : {&member.socket, &member.pidfd}) {
                if (!*fd) continue;
                items.push_back({fd->get(), POLLIN, 0});
                members.push_back(rank);
            }
        }
        const size_t first_stranger = items.size();
        for (const Stranger& stranger : strangers_) items.push_back({stranger.socket.get(), POLLIN, 0});
        if (::poll(items.data(), items.size(), patience_.slice_ms(limit_ms)) < 0) return;

        for (size_t i = 0; i < members.size(); ++i)
            if (items[1 + i].revents != 0) hear(members[i]);
        for (size_t i = 0; i < strangers_.size(); ++i)
            if (items[first_stranger + i].revents != 0 && strangers_[i].socket) hear(strangers_[i]);
        const auto now = Clock::now();
        std::erase_if(strangers_, [now](const Stranger& s) { return !s.socket || now >= s.until; });
        if (items[0].revents != 0) accept_strangers();
    }

    void check_time() {
        patience_.tick();
        if (failure_ && (patience_.expired() || Clock::now() >= tell_until_)) throw *failure_;
        if (patience_.expired()) throw late(options_.timeout);
        patience_.warn([this](double seconds) { return late(seconds); });
    }

    /// Handles all new messages of a member; throws when it has failed or gone.
    void hear(int rank) {
        Member& member = members_[static_cast<size_t>(rank)];
        if (!member.socket) return;                  // dismissed
        const bool ended = has_ended(member.pidfd);  // checked first: what it sent before it ended still counts
        Message message;
        IoStatus status;
        while ((status = try_receive(member.socket.get(), message)) == IoStatus::done) {
            const std::optional<Packet> packet = decode(message.data);
            if (packet && packet->kind == MessageKind::failure) return fail(decode_failure(*packet));
            if (packet && packet->kind == MessageKind::expired) throw late(packet->value / 1000.0);
            if (!packet || packet->kind != MessageKind::ack) {
                throw backend_unavailable(5015, "rank ", rank, " (pid ", member.pid,
                                          ") sent an unexpected message while joining ", describe(options_));
            }
            member.confirmed = true;
        }
        if (status == IoStatus::closed || ended) throw lost(rank);
    }

    void accept_strangers() {
        for (int i = 0; i < options_.size + 64; ++i) {  // a flood must not delay the members
            UniqueFd socket;
            try {
                socket = accept_connection(listener_.get());
            } catch (const Error& error) {
                if (strangers_.empty()) {
                    fail(error);
                } else if (Clock::now() - strangers_.front().came > stranger_pause) {
                    strangers_.erase(strangers_.begin());  // its descriptor is needed
                } else {  // most likely it is a member, about to introduce itself; the others wait at the door
                    std::this_thread::sleep_for(std::chrono::milliseconds(1));
                    return;
                }
                continue;
            }
            if (!socket) return;
            const Credentials credentials = peer_credentials(socket.get());
            if (credentials.uid != geteuid()) continue;
            if (strangers_.size() == most_strangers) strangers_.erase(strangers_.begin());
            strangers_.push_back({std::move(socket), credentials.pid, Clock::now() + stranger_patience});
        }
    }

    /// Handles a message of a stranger; leaves it without a socket if it is dropped.
    void hear(Stranger& stranger) {
        Message message;
        try {
            if (try_receive(stranger.socket.get(), message) == IoStatus::again) return;
        } catch (const Error&) {
            message.data.clear();  // too long
        }
        const std::optional<Packet> packet = decode(message.data);  // nothing in an empty message
        if (packet && packet->kind == MessageKind::present) {
            try_send(stranger.socket.get(), encode(MessageKind::present));
            stranger.socket.reset();
            return;
        }
        const std::optional<BootstrapOptions> hello = packet ? decode_hello(*packet) : std::nullopt;
        if (const auto reason = hello ? why_no_member(packet->version, *hello, options_) : std::nullopt) {
            refused_ = "; pid " + std::to_string(stranger.pid) + " was refused: " + reason->what();
            try_send(stranger.socket.get(), encode_failure(*reason, options_));
        } else if (hello) {
            admit(*hello, stranger);
        }
        stranger.socket.reset();
    }

    static bool has_hung_up(const UniqueFd& socket) {
        pollfd item{socket.get(), POLLRDHUP, 0};
        return ::poll(&item, 1, 0) > 0;
    }

    /// Opens the pidfd of a stranger who becomes a member. Where no descriptor is left, the oldest other one gives its.
    UniqueFd watch(const Stranger& member) {
        UniqueFd pidfd = open_pidfd(member.pid);
        if (pidfd || (errno != EMFILE && errno != ENFILE)) return pidfd;
        const auto other = std::ranges::find_if(
            strangers_, [&](const Stranger& stranger) { return &stranger != &member && stranger.socket; });
        if (other != strangers_.end()) other->socket.reset();
        return open_pidfd(member.pid);
    }

    /// Admits or refuses a stranger. A refused one stays in the list, so that it learns the reason with all others.
    void admit(const BootstrapOptions& hello, Stranger& stranger) {
        std::optional<Error> difference;
        try {
            check_joining(hello, options_);
        } catch (const Error& error) {
            if (hello.size != options_.size || hello.rank < 0 || hello.rank >= options_.size) throw;
            difference = error;
        }
        Member& member = members_[static_cast<size_t>(hello.rank)];
        // One that has hung up gave up on a slow root, or has ended: it tries again, or another has taken its place.
        const bool is_taken = hello.rank == 0 || (member.joined && !has_hung_up(member.socket));
        if (!failure_ && is_taken) throw joined_twice(hello, member.pid, stranger.pid);
        if (stranger.pid == 0) {
            throw backend_unavailable(5013, "rank 0 and rank ", hello.rank, " of ", describe(options_),
                                      different_namespaces);
        }
        member.pid = stranger.pid;
        member.pidfd = watch(stranger);
        member.socket = std::move(stranger.socket);
        member.joined = true;
        if (failure_) return dismiss(member);
        if (difference) return tell(*difference);
        try_send(member.socket.get(), encode(MessageKind::welcome));  // the next step notices if the member is gone
    }

    /// What a rank has said, which is not told to those who come later unless a resource has run out.
    void fail(const Error& error) {
        if (error.kind() != ErrorClass::resource || is_alone()) throw error;
        tell(error);
    }

    /// A rank cannot join: all who have come are told, and others as they come, with the descriptors of those who know.
    /// Once all have come it is thrown.
    void tell(const Error& error) {
        if (waiting_for(&Member::joined).empty()) throw error;
        if (failure_) return;
        failure_ = error;
        tell_until_ = after(telling);
        for (Member& member : members_) dismiss(member);
    }

    void dismiss(Member& member) {
        if (member.socket) try_send(member.socket.get(), encode_failure(*failure_, options_));
        member.socket.reset();
        member.pidfd.reset();
    }

    bool is_alone() const { return waiting_for(&Member::joined).size() == members_.size() - 1; }

    /// Sends the pids and the control segment to every peer, and a socket to every pair, one pair at a time.
    void distribute(int control) {
        std::string pids;
        for (const Member& member : members_) pids.append(reinterpret_cast<const char*>(&member.pid), sizeof(pid_t));
        for (int rank = 1; rank < options_.size; ++rank) deliver(rank, encode(MessageKind::table, 0, pids), control);
        for (int low = 0; low < options_.size; ++low) {
            for (int high = low + 1; high < options_.size; ++high) {
                auto [for_low, for_high] = socket_pair();
                deliver(high, encode(MessageKind::pair, low), for_high.get());
                if (low == 0)
                    members_[static_cast<size_t>(high)].link = std::move(for_low);
                else
                    deliver(low, encode(MessageKind::pair, high), for_low.get());
            }
        }
    }

    void deliver(int rank, const std::string& data, int fd) {
        check_time();
        while (true) {
            const IoStatus status = try_send(members_[static_cast<size_t>(rank)].socket.get(), data, {&fd, 1});
            if (status == IoStatus::done) return;
            if (status == IoStatus::closed) {
                hear(rank);  // reports its own reason, if it has sent one
                throw lost(rank);
            }
            step(1);  // it has not read earlier messages
        }
    }

    /// From here on all ranks have everything: a rank that ends now is a lost member.
    Membership commit(Membership membership) {
        for (Member& member : members_) {
            if (member.socket) try_send(member.socket.get(), encode(MessageKind::commit));
            membership.peers.push_back({member.pid, std::move(member.pidfd), std::move(member.link)});
        }
        return membership;
    }

    void tell_everybody(const Error& error) noexcept {
        try {
            if (listener_) accept_strangers();
        } catch (...) {  // no descriptor is left
        }
        const auto tell = [&](const UniqueFd& socket) {
            try {
                if (socket) try_send(socket.get(), encode_failure(error, options_));
            } catch (...) {  // it notices the closed socket
            }
        };
        for (const Member& member : members_) tell(member.socket);
        for (const Stranger& stranger : strangers_) tell(stranger.socket);
    }

    std::vector<int> waiting_for(bool Member::* state) const {
        std::vector<int> ranks;
        for (int rank = 1; rank < options_.size; ++rank)
            if (!(members_[static_cast<size_t>(rank)].*state)) ranks.push_back(rank);
        return ranks;
    }

    Error late(double seconds) const {
        const std::vector<int> absent = waiting_for(&Member::joined);
        if (!absent.empty()) return absent_error(options_, seconds, absent, "had not joined", refused_);
        return absent_error(options_, seconds, waiting_for(&Member::confirmed), "had not finished joining");
    }

    Error lost(int rank) const {
        return peer_lost(4010, "rank ", name_of(options_, rank), " (pid ", members_[static_cast<size_t>(rank)].pid,
                         ") ended or left while joining ", describe(options_));
    }

    const BootstrapOptions& options_;
    Patience patience_;
    UniqueFd listener_;
    std::vector<Member> members_;
    std::vector<Stranger> strangers_;
    std::optional<Error> failure_;  ///< of a rank that cannot join, told to all
    Clock::time_point tell_until_;  ///< with a failure: when those who have not come are given up
    std::string refused_;           ///< the last refused stranger and the reason, for a timeout's error
};

}  // namespace

Membership open_domain(const BootstrapOptions& options) {
    return Root(options).run();
}

}  // namespace alltoallv
