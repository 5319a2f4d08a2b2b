#include "runtime/hosts/tcp_join.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <mutex>
#include <stop_token>
#include <system_error>
#include <thread>

#include "runtime/base/error.h"
#include "runtime/base/place.h"
#include "runtime/base/seconds_text.h"
#include "runtime/base/sha256.h"
#include "runtime/bootstrap/without_descriptors.h"
#include "runtime/core/late_warning.h"
#include "runtime/hosts/tcp_hello.h"
#include "runtime/hosts/tcp_pending.h"

namespace alltoallv {
namespace {

/// A rank's answer to rank 0's challenge, with a challenge of its own.
struct SignedHello {
    Digest challenge{}, proof{};
    TcpHello hello;
};

std::vector<TcpPeer> peers_of(const std::vector<TcpHello>& all, int rank) {
    const std::string place = text_of(all[static_cast<size_t>(rank)].place);
    std::vector<TcpPeer> peers;
    for (const TcpHello& hello : all) {
        const auto first = std::find_if(all.begin(), all.end(), [&](const TcpHello& other) {
            return text_of(other.place) == text_of(hello.place);
        });
        peers.push_back({hello.pid, place_number(text_of(hello.place)), text_of(hello.place) == place,
                         static_cast<int>(first - all.begin()), text_of(hello.host)});
    }
    return peers;
}

template <class T>
std::string bytes_of(const T& value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
}

/// Proves that the sender knows the key and has received the other side's challenge.
Digest prove(const std::string& key, const char* role, const Digest& challenge, const Digest& own,
             const TcpHello& hello) {
    return hmac_sha256(key, role + bytes_of(challenge) + bytes_of(own) + bytes_of(hello));
}

constexpr const char* secret_hint = "are job, domain and ALLTOALLV_JOB_SECRET equal on all ranks?";

/// Sends the reason of the failure to the ranks that have arrived, and lets them go.
void tell(TcpMembership& membership, const Error& error) {
    for (UniqueFd& socket : membership.sockets) {
        if (socket) answer_with(socket.get(), error);
        socket.reset();
    }
}

[[noreturn]] void refuse(TcpMembership& membership, const Error& error) {
    tell(membership, error);
    throw error;
}

std::string unproven(int count) {
    if (count == 0) return "";
    return "; " + std::to_string(count) + " tries to join did not know the domain's secret: " + secret_hint;
}

std::string absent(const TcpMembership& membership) {
    std::string names;
    for (size_t j = 1; j < membership.sockets.size(); ++j)
        if (!membership.sockets[j]) names += (names.empty() ? "rank " : ", rank ") + std::to_string(j);
    return names;
}

bool is_same(const TcpHello& one, const TcpHello& other) {
    return one.pid == other.pid && text_of(one.place) == text_of(other.place);
}

std::string process_of(const TcpHello& hello) {
    return "pid " + std::to_string(hello.pid) + " on " + text_of(hello.host);
}

bool has_hung_up(const UniqueFd& socket) {
    pollfd item{socket.get(), POLLRDHUP, 0};
    return !socket || ::poll(&item, 1, 0) > 0;
}

std::optional<Error> join(const std::vector<TcpAddress>& addresses, const TcpJoinOptions& options,
                          TcpMembership& membership);

/// Looks, once a meeting takes longer than usual, if another process is rank 0 at the address that all ranks know: this
/// one would wait for ranks that never come.
class OtherRoot {
  public:
    OtherRoot(const std::vector<TcpAddress>& addresses, const TcpJoinOptions& options)
        : addresses_(addresses), options_(options) {
        options_.poll = [this] {
            if (stops_.stop_requested()) throw Stopped{};
        };
        options_.warn_after = options_.timeout;  // the other part of this process warns
    }

    ~OtherRoot() { stop(); }
    OtherRoot(const OtherRoot&) = delete;
    OtherRoot& operator=(const OtherRoot&) = delete;

    /// Returns what the other one says to a second rank 0.
    std::optional<Error> said() {
        if (!looks_ && !addresses_.empty() && seconds_since(begin_) >= usual) look();
        const std::lock_guard lock(mutex_);
        return said_;
    }

    void stop() { stops_.request_stop(); }

  private:
    struct Stopped {};
    static constexpr double usual = 1.0;  // seconds

    void look() {
        looks_ = true;
        const auto run = [this] {
            try {
                TcpMembership membership;
                std::optional<Error> said = join(addresses_, options_, membership);
                const std::lock_guard lock(mutex_);
                said_ = std::move(said);
            } catch (...) {  // nobody is there
            }
        };
        try {
            thread_ = std::jthread(run);
        } catch (const std::system_error&) {  // without a thread the timeout holds
        }
    }

    const std::vector<TcpAddress> addresses_;
    TcpJoinOptions options_;
    const Clock::time_point begin_ = Clock::now();
    bool looks_ = false;
    std::stop_source stops_;
    std::mutex mutex_;
    std::optional<Error> said_;
    std::jthread thread_;  // ends first
};

UniqueFd listen_when_free(int port, const TcpJoinOptions& options, OtherRoot& other_root);
TcpMembership receive_ranks(UniqueFd listener, const TcpJoinOptions& options, OtherRoot& other_root);

void receive_apart(int port, const TcpJoinOptions& options, const Error& error) {
    tell_apart(options, error, [port](const auto& apart) {
        OtherRoot nowhere({}, apart);
        receive_ranks(listen_when_free(port, apart, nowhere), apart, nowhere);
    });
}

/// Receives the ranks into `membership`; if one of them cannot join, tells all why, and returns it.
std::optional<Error> receive(const UniqueFd& listener, const TcpJoinOptions& options, OtherRoot& other_root,
                             TcpMembership& membership) {
    auto deadline = after(options.timeout);
    std::vector<TcpHello> hellos(static_cast<size_t>(options.size));
    hellos[0] = introduce(options);
    std::optional<Error> failure;
    if (options.failure) failure = failure_of(hellos[0], options.domain);
    membership.sockets.resize(hellos.size());
    PendingConnections pending(listener.get(), sizeof(SignedHello), true);
    int refused = 0;
    LateWarning warning(options.warn_after);
    const auto late = [&](double seconds) {
        return joined("rank 0 waited ", seconds_text(seconds), " for ", absent(membership), " to join domain '",
                      options.domain, "' at port ", port_of(listener.get()), unproven(refused));
    };
    for (int waiting = options.size - 1; waiting > 0;) {
        if (options.poll) options.poll();
        if (const auto said = other_root.said()) refuse(membership, *said);
        if (failure && Clock::now() >= deadline) break;
        if (Clock::now() >= deadline) refuse(membership, comm_timeout(4027, late(options.timeout)));
        warning.look(late);
        for (PendingConnection& connection : pending.next(static_cast<int>(tcp_pause.count()))) {
            SignedHello given;
            std::memcpy(&given, connection.rx_buffer.data(), sizeof given);
            const TcpHello& hello = given.hello;
            if (hello.magic != tcp_magic ||
                !equal(given.proof, prove(options.key, "join", connection.challenge, given.challenge, hello))) {
                ++refused;
                continue;  // it belongs to another domain and will try again
            }
            const Digest proof = prove(options.key, "root", given.challenge, connection.challenge, hello);
            if (!send_all(connection.socket.get(), &proof, sizeof proof)) continue;
            if (hello.size != options.size || hello.rank < 0 || hello.rank >= options.size) {
                membership.sockets.push_back(std::move(connection.socket));
                refuse(membership, invalid_param(1109, "rank ", hello.rank, " of ", hello.size, " came to domain '",
                                                 options.domain, "', which has ", options.size, " ranks"));
            }
            TcpHello& known = hellos[static_cast<size_t>(hello.rank)];
            if (hello.rank == 0 && is_same(known, hello)) {  // this process has found itself
                other_root.stop();
                continue;
            }
            if (known.magic != 0 && !is_same(known, hello) &&
                (hello.rank == 0 || !has_hung_up(membership.sockets[static_cast<size_t>(hello.rank)]))) {
                membership.sockets.push_back(std::move(connection.socket));
                refuse(membership,
                       invalid_param(1110, "rank ", hello.rank, " came to domain '", options.domain, "' twice, as ",
                                     process_of(known), " and ", process_of(hello), ": do two jobs have one address?"));
            }
            if (known.magic == 0) --waiting;  // else it has tried again
            known = hello;
            membership.sockets[static_cast<size_t>(hello.rank)] = std::move(connection.socket);
            if (hello.failure != 0 && !failure) {
                failure = failure_of(hello, options.domain);
                deadline = std::min(deadline, after(telling));
            }
            const auto settings = [](const TcpHello& of) {
                return std::array{std::string(of.checks != 0 ? "check = 'always'" : "check = 'off'"),
                                  "release = '" + text_of(of.release) + "'"};
            };
            const auto named = [](int rank) { return joined("rank ", rank); };
            const auto own = settings(hellos[0]), its = settings(hello);
            for (size_t i = 0; i < own.size() && !failure; ++i) {
                if (its[i] == own[i]) continue;
                failure = invalid_param(1087, named(hello.rank), " has ", its[i], ", ", named(0), " has ", own[i],
                                        ": settings of domain '", options.domain, "' must be equal on every rank");
                deadline = std::min(deadline, after(telling));
            }
            if (failure) tell(membership, *failure);
        }
    }
    if (failure) return failure;
    const TcpAnswer welcome{tcp_magic, 0, static_cast<uint32_t>(hellos.size() * sizeof(TcpHello))};
    for (const UniqueFd& socket : membership.sockets)
        if (socket && send_all(socket.get(), &welcome, sizeof welcome))
            (void)send_all(socket.get(), hellos.data(), welcome.bytes);
    membership.peers = peers_of(hellos, 0);
    return std::nullopt;
}

/// Joins rank 0, and returns nothing, or what keeps a rank from joining.
std::optional<Error> join(const std::vector<TcpAddress>& addresses, const TcpJoinOptions& options,
                          TcpMembership& membership) {
    const auto deadline = after(options.timeout);
    const auto soon = [deadline] { return std::min(deadline, after(tcp_patience)); };
    SignedHello own;
    own.hello = introduce(options);
    bool refused = false, found = false;
    LateWarning warning(options.warn_after);
    const auto late = [&](double seconds) {
        std::string tried;
        for (const TcpAddress& address : addresses)
            tried += (tried.empty() ? "" : ", ") + address.host + ":" + std::to_string(address.port);
        return joined("rank ", options.rank, " waited ", seconds_text(seconds), " for rank 0 of domain '",
                      options.domain, "' at ", tried,
                      refused ? std::string(", where somebody does not know the domain's secret: ") + secret_hint
                      : found
                          ? ""
                          : ", where nobody listens: rank 0 has not come, or the ranks have met without this process");
    };
    for (;;) {
        for (const TcpAddress& address : addresses) {
            membership.sockets.clear();
            membership.sockets.push_back(
                connect_tcp(address, std::chrono::duration<double>(soon() - Clock::now()).count()));
            const int socket = membership.sockets[0].get();
            Digest challenge, proof;
            found = found || socket >= 0;
            if (socket < 0 || !receive_all(socket, &challenge, sizeof challenge, soon())) continue;
            own.challenge = random_digest();
            own.proof = prove(options.key, "join", challenge, own.challenge, own.hello);
            if (!send_all(socket, &own, sizeof own)) continue;
            // A process that is not rank 0 of this domain closes the connection, or cannot prove it.
            refused = true;
            if (!receive_all(socket, &proof, sizeof proof, soon()) ||
                !equal(proof, prove(options.key, "root", own.challenge, challenge, own.hello)))
                continue;
            refused = false;
            std::optional<Error> failure;
            const auto answer = receive_answer(socket, deadline + std::chrono::seconds(2), options, failure);
            if (failure) return failure;
            if (!answer) continue;
            std::vector<TcpHello> all(static_cast<size_t>(options.size));
            if (answer->bytes != all.size() * sizeof(TcpHello) ||
                !receive_all(socket, all.data(), answer->bytes, after(tcp_patience)))
                continue;
            membership.peers = peers_of(all, options.rank);
            return std::nullopt;
        }
        if (Clock::now() >= deadline) throw comm_timeout(4028, late(options.timeout));
        warning.look(late);
        if (options.poll) options.poll();
        std::this_thread::sleep_for(tcp_pause);
    }
}

std::string lost(int rank) {
    return "rank " + std::to_string(rank) + " was lost while it joined: its connection has ended";
}

/// Receives every other rank's hello, even after a failure, so that none receives its answer while it still joins.
std::optional<Error> receive_hellos(const TcpMembership& membership, const TcpJoinOptions& options) {
    const Clock::time_point deadline = after(options.timeout);
    std::optional<Error> failure;
    for (size_t j = 1; j < membership.sockets.size(); ++j) {
        const int socket = membership.sockets[j].get();
        TcpHello hello;
        const bool heard =
            wait_readable(socket, deadline, options) && receive_all(socket, &hello, sizeof hello, after(tcp_patience));
        if (failure || (heard && hello.failure == 0)) continue;
        failure = heard ? failure_of(hello, options.domain) : peer_lost(4029, lost(static_cast<int>(j)));
    }
    return failure;
}

UniqueFd listen_when_free(int port, const TcpJoinOptions& options, OtherRoot& other_root) {
    const auto deadline = after(options.timeout);
    for (;;) {
        try {
            if (UniqueFd listener = listen_tcp(port)) return listener;
        } catch (const Error& error) {
            receive_apart(port, options, error);
            throw;
        }
        if (Clock::now() >= deadline)
            throw comm_timeout(4030, "rank 0 could not listen on port ", port, " within ",
                               seconds_text(options.timeout), ": it is in use; ALLTOALLV_ROOT_PORT chooses another");
        if (const auto said = other_root.said()) throw *said;
        if (options.poll) options.poll();
        std::this_thread::sleep_for(tcp_pause);
    }
}

TcpMembership receive_ranks(UniqueFd listener, const TcpJoinOptions& options, OtherRoot& other_root) {
    TcpMembership membership;
    const int port = port_of(listener.get());
    std::optional<Error> failure;
    try {
        failure = receive(listener, options, other_root, membership);
    } catch (const Error& error) {
        listener.reset();
        membership.sockets.clear();  // they will try again
        receive_apart(port, options, error);
        throw;
    }
    if (failure) throw *failure;
    return membership;
}

}  // namespace

TcpMembership receive_ranks(UniqueFd listener, const TcpJoinOptions& options) {
    OtherRoot nowhere({}, options);
    return receive_ranks(std::move(listener), options, nowhere);
}

TcpMembership receive_ranks_at(const TcpAddress& address, const TcpJoinOptions& options) {
    OtherRoot other_root({address}, options);
    return receive_ranks(listen_when_free(address.port, options, other_root), options, other_root);
}

TcpMembership join_rank_0(const std::vector<TcpAddress>& addresses, const TcpJoinOptions& options) {
    TcpMembership membership;
    std::optional<Error> failure;
    try {
        failure = join(addresses, options, membership);
    } catch (const Error& error) {
        tell_apart(options, error, [&](const auto& apart) { join_rank_0(addresses, apart); });
        throw;
    }
    if (failure) throw *failure;
    return membership;
}

void confirm(const TcpMembership& membership, TcpJoinOptions options, const std::optional<Error>& failure) {
    options.failure = failure;
    const TcpHello hello = introduce(options);
    std::optional<Error> heard;
    if (options.rank != 0) {
        const int socket = membership.sockets[0].get();
        if (!send_all(socket, &hello, sizeof hello) ||
            !receive_answer(socket, after(options.timeout + tcp_patience), options, heard))
            heard = peer_lost(4029, lost(0));
    } else {
        heard = receive_hellos(membership, options);
        if (failure) heard = failure_of(hello, options.domain);
        const TcpAnswer welcome{tcp_magic};
        for (const UniqueFd& socket : membership.sockets) {
            if (socket && heard) answer_with(socket.get(), *heard);
            if (socket && !heard) (void)send_all(socket.get(), &welcome, sizeof welcome);
        }
    }
    if (failure) throw *failure;
    if (heard) throw *heard;
}

}  // namespace alltoallv
