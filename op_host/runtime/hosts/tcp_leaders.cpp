#include "runtime/hosts/tcp_leaders.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <set>
#include <utility>

#include "runtime/base/process_state.h"
#include "runtime/bootstrap/reactor.h"
#include "runtime/control/liveness.h"

namespace alltoallv {
namespace {

constexpr int farewell_ms = 1000;
constexpr int patience_ms = 30000;         // for a leader that takes nothing, while nothing has failed
constexpr int64_t ping_ns = 500'000'000;   // from one ping to the next, and until a leader counts as silent
constexpr int64_t absent_ns = 60'000'000;  // of waiting, until leaders tell each other who is absent

}  // namespace

/// Holds the mutex; at the end of the outermost one, reads what came while this side was sending.
class TcpLeaders::Lock {
  public:
    explicit Lock(TcpLeaders& leaders) : lock_(leaders.mutex_), leaders_(leaders) { ++leaders_.lock_depth_; }
    ~Lock() {
        for (size_t i = 0; leaders_.lock_depth_ == 1 && i < leaders_.connections_.size(); ++i) {
            Connection& connection = leaders_.connections_[i];
            if (connection.rx_backlog.empty()) continue;
            connection.rx_buffer += std::exchange(connection.rx_backlog, {});
            if (!connection.ended) leaders_.read_messages(i);
            i = SIZE_MAX;  // reading may have led to sending: from the first one again
        }
        --leaders_.lock_depth_;
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

  private:
    const std::lock_guard<std::recursive_mutex> lock_;
    TcpLeaders& leaders_;
};

/// Lets a forked child close its copies, because a connection ends when all owners have closed it.
struct TcpLeadersOfProcess {
    std::mutex mutex;
    std::set<TcpLeaders*> all;

    static TcpLeadersOfProcess& instance() { return ProcessState<TcpLeadersOfProcess>::get(); }

    void forget() const {
        for (TcpLeaders* leaders : all) close(*leaders);
    }
    static void close(TcpLeaders& leaders) {
        for (TcpLeaders::Connection& connection : leaders.connections_) connection.socket.reset();
        leaders.local_.clear();
    }
};

TcpLeaders::TcpLeaders(TcpMembership membership, std::vector<int> here, std::vector<Peer> local, ControlPlane& control)
    : control_(control),
      tree_(membership.peers),
      here_(std::move(here)),
      local_(std::move(local)),
      connections_(connect(membership)),
      agreement_(make_agreement()),
      waits_sent_(membership.peers.size()),
      departures_sent_(membership.peers.size()) {}

std::vector<TcpLeaders::Connection> TcpLeaders::connect(TcpMembership& membership) const {
    std::vector<Connection> connections;
    if (!leads()) return connections;
    const int host = tree_.host_of(here_[0]);
    for (const int other : tree_.neighbours(host)) {
        Connection& connection = connections.emplace_back();
        connection.leader = tree_.leader(other);
        connection.is_parent = other < host;
        connection.socket = std::move(membership.sockets[static_cast<size_t>(connection.leader)]);
        for (int k = 0; k < control_.size(); ++k) {
            if (!is_here(k) && tree_.towards(host, tree_.host_of(k)) == other) connection.ranks.push_back(k);
        }
    }
    return connections;
}

TreeAgreement TcpLeaders::make_agreement() {
    std::vector<TreeAgreement::Behind> behind;
    for (const Connection& connection : connections_) {
        const std::vector<int>& ranks = connection.ranks;
        const auto listed = static_cast<ptrdiff_t>(std::min(ranks.size(), TreeAgreement::most_absent));
        behind.push_back({static_cast<uint32_t>(ranks.size()), {ranks.begin(), ranks.begin() + listed}});
    }
    TreeAgreement::Leader leader;
    leader.send = [this](size_t to, uint64_t seq, const Summary& sum) { send_sum(to, seq, sum); };
    leader.others_known = [this](uint64_t seq, const Summary& others) { control_.receive_sum(seq, others); };
    leader.complete = [this](uint64_t seq, const Summary& all) {
        if (all.needs_rows()) send_rows(here_, seq, nobody);
    };
    leader.send_absent = [this](size_t to, uint64_t seq, const TreeAgreement::Ranks& ranks) {
        send(connections_[to], {0, MessageKind::absent, 0, {}, seq},
             {reinterpret_cast<const char*>(ranks.data()), ranks.size() * sizeof ranks[0]});
    };
    leader.arrived = [this](size_t from, uint64_t seq, const TreeAgreement::Ranks& absent) {
        const bool all_listed = absent.size() < TreeAgreement::most_absent;
        for (const int rank : connections_[from].ranks)
            if ((all_listed || rank < absent.back()) && !std::binary_search(absent.begin(), absent.end(), rank))
                control_.receive_arrival(rank, seq);
    };
    leader.absent_here = [this](uint64_t seq) {
        TreeAgreement::Ranks absent;
        for (const int j : here_)
            if (!control_.has_row(j, seq)) absent.push_back(j);
        return absent;
    };
    return {behind, control_.checks(), std::move(leader)};
}

TcpLeaders::~TcpLeaders() {
    stop();
}

void TcpLeaders::watch() {
    auto& of_process = TcpLeadersOfProcess::instance();
    {
        const std::lock_guard lock(of_process.mutex);
        of_process.all.insert(this);
    }
    // Calls with this object before their own arguments, as long as it lives.
    const auto weakly = [weak = weak_from_this()](auto call) {
        return [weak, call](const auto&... arguments) {
            if (const auto self = weak.lock()) call(*self, arguments...);
        };
    };
    control_.on_poison = weakly([](TcpLeaders& self) { self.send_news(); });
    control_.hosts =
        ControlPlane::Hosts{here_,
                            weakly([](TcpLeaders& self, uint64_t seq) { self.published(seq); }),
                            control_.on_poison,
                            [weak = weak_from_this()](int rank) {
                                const auto self = weak.lock();
                                return self ? self->cut_off(rank) : -1;
                            },
                            [weak = weak_from_this()](int rank) {
                                const auto self = weak.lock();
                                return self ? self->hidden_by(rank) : rank;
                            },
                            weakly([](TcpLeaders& self, uint64_t seq, const CountMismatch& difference) {
                                const std::string body(reinterpret_cast<const char*>(&difference), sizeof difference);
                                self.send_to_others(nobody, {0, MessageKind::difference, 0, {}, seq}, body);
                            })};
    const auto listen = [&](const UniqueFd& fd, auto call) {
        if (fd) Reactor::instance().add(fd.get(), weakly([call](TcpLeaders& self, uint32_t) { call(self); }));
    };
    for (size_t i = 0; i < local_.size(); ++i) {
        listen(local_[i].pidfd, [i](TcpLeaders& self) { self.on_local(i, true, "its process has ended"); });
        listen(local_[i].socket, [i](TcpLeaders& self) { self.on_local(i, false, "its connection was closed"); });
    }
    for (size_t i = 0; i < connections_.size(); ++i)
        listen(connections_[i].socket, [i](TcpLeaders& self) { self.on_bytes(i); });
}

/// Messages from another host come through the leaders between this one and it.
int TcpLeaders::cut_off(int rank) const {
    if (is_here(rank)) return -1;
    const int last = tree_.host_of(rank);
    for (int host = tree_.host_of(here_[0]);; host = tree_.towards(host, last)) {
        if (control_.has_left(tree_.leader(host))) return tree_.leader(host);
        if (host == last) return -1;
    }
}

/// The rows of ranks on another host come through the leaders between this one and it. One whose program is late still
/// passes them on; one that is stopped does not.
int TcpLeaders::hidden_by(int rank) const {
    if (is_here(rank)) return rank;
    const auto pid = control_.status(here_[0]).pid.load(std::memory_order_relaxed);
    if (!leads() && std::string(process_state(pid)) == "stopped") return here_[0];
    const int last = tree_.host_of(rank);
    for (int host = tree_.host_of(here_[0]); host != last;) {
        host = tree_.towards(host, last);
        if (control_.status(tree_.leader(host)).silent.load(std::memory_order_relaxed) != 0) return tree_.leader(host);
    }
    return rank;
}

/// The last rank on its host lets the leader agree.
void TcpLeaders::published(uint64_t seq) {
    full_fence();  // of several ranks that publish at the same time, the last one sees the rows of all
    if (!has_all_here(seq)) return;
    if (!leads()) return send_news();
    const Lock lock(*this);
    if (!stopped_) send_sums();
}

void TcpLeaders::send_news() {
    if (!leads()) {
        const std::lock_guard lock(mutex_);
        const char ring = 0;  // its socket is full of these, or it is about to look
        if (!stopped_ && local_[0].socket) (void)::send(local_[0].socket.get(), &ring, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
        return;
    }
    const Lock lock(*this);
    if (stopped_) return;
    send_sums();
    send_poison();
    send_departures();
    send_waits();
    note_wait();
    ping();
}

void TcpLeaders::note_wait() {
    const uint64_t seq = agreement_.next();
    if (std::none_of(here_.begin(), here_.end(), [&](int j) { return control_.has_row(j, seq); })) return;
    if (std::exchange(waited_for_, seq) != seq)
        waited_since_ns_ = now_ns();
    else if (now_ns() - waited_since_ns_ >= absent_ns)
        agreement_.look();
}

/// Asks the other leaders, while this host waits, if they are there.
void TcpLeaders::ping() {
    const int64_t now = now_ns();
    for (Connection& connection : connections_) {
        if (now - connection.pinged_at_ns < ping_ns) continue;
        if (!connection.responsive) {
            note_silence(connection, true);
            continue;
        }
        connection.pinged_at_ns = now;
        connection.responsive = false;
        send(connection, {0, MessageKind::ping, 0, {}, 0}, {});
    }
}

/// Keeps it in this host's segment, and passes it on to the others.
void TcpLeaders::note_silence(const Connection& connection, bool silent) {
    const uint32_t value = silent ? 1 : 0;
    if (control_.status(connection.leader).silent.exchange(value, std::memory_order_relaxed) == value) return;
    send_to_others(static_cast<size_t>(&connection - connections_.data()),
                   {0, MessageKind::silent, connection.leader, {}, value}, {});
}

void TcpLeaders::send_poison() {
    if (!control_.poisoned() || std::exchange(poison_sent_, true)) return;
    const auto poison = control_.received_poison();
    send_to_others(nobody, {0, MessageKind::poisoned, poison.by, poison.kind, static_cast<uint64_t>(poison.lost + 1)},
                   poison.reason);
}

void TcpLeaders::send_departures() {
    for (const int j : here_)
        if (control_.has_left(j) && !departures_sent_[static_cast<size_t>(j)]) {
            departures_sent_[static_cast<size_t>(j)] = true;
            const uint64_t last = std::max(row(j, 0).seq.load(), row(j, 1).seq.load());
            send_to_others(nobody, {0, MessageKind::departed, j, {}, last << 1 | control_.status(j).ended.load()}, {});
        }
}

void TcpLeaders::on_local(size_t index, bool ended, const std::string& how) {
    const std::lock_guard lock(mutex_);
    if (stopped_ || index >= local_.size()) return;
    Peer& peer = local_[index];
    char rings[64];
    for (ssize_t got = 1; !ended && got > 0;) {
        got = ::recv(peer.socket.get(), rings, sizeof rings, MSG_DONTWAIT);
        ended = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
    }
    if (leads()) send_news();
    if (!ended) return;
    ignore(peer);
    if (!control_.has_left(here_[index])) control_.lost(here_[index], how);
}

void TcpLeaders::ignore(const Peer& peer) {
    for (const UniqueFd* fd : {&peer.socket, &peer.pidfd})
        if (*fd) Reactor::instance().remove(fd->get());
}

/// Takes what has arrived. Returns false at the end of the connection.
bool TcpLeaders::receive(Connection& connection, std::string& into) {
    char chunk[65536];
    for (;;) {
        const ssize_t got = ::recv(connection.socket.get(), chunk, sizeof chunk, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return true;
        if (got <= 0) return false;
        into.append(chunk, static_cast<size_t>(got));
        if (static_cast<size_t>(got) < sizeof chunk) return true;
    }
}

void TcpLeaders::on_bytes(size_t index) {
    const Lock lock(*this);
    Connection& connection = connections_[index];
    if (connection.ended) return;
    const bool goes_on = receive(connection, connection.rx_buffer);
    connection.responsive = true;
    note_silence(connection, false);
    read_messages(index);
    if (!goes_on && !connection.ended) on_end(connection);
}

void TcpLeaders::read_messages(size_t index) {
    Connection& connection = connections_[index];
    size_t at = 0;
    try {
        for (Message message; connection.rx_buffer.size() - at >= sizeof message;
             at += sizeof message + message.bytes) {
            std::memcpy(&message, connection.rx_buffer.data() + at, sizeof message);
            if (message.bytes > most_bytes() || message.rank < 0 || message.rank >= control_.size())
                throw invalid_message();
            if (connection.rx_buffer.size() - at < sizeof message + message.bytes) break;
            on_message(index, message, connection.rx_buffer.data() + at + sizeof message);
        }
        connection.rx_buffer.erase(0, at);
    } catch (const std::exception& error) {
        control_.lost(connection.leader, error.what());
        on_end(connection);
    }
}

void TcpLeaders::on_message(size_t index, const Message& message, const char* body) {
    Connection& connection = connections_[index];
    switch (message.kind) {
        case MessageKind::sum:
            return receive_sum(index, message, body);
        case MessageKind::absent:
            return receive_absent(index, message, body);
        case MessageKind::rows:
            return receive_rows(index, message, body);
        case MessageKind::difference: {
            CountMismatch difference;
            if (message.bytes != sizeof difference || !connection.is_parent) break;
            std::memcpy(&difference, body, sizeof difference);
            send_to_others(index, message, std::string(body, message.bytes));
            return control_.receive_mismatch(message.seq, difference);
        }
        case MessageKind::poisoned:
            if (message.seq > static_cast<uint64_t>(control_.size())) break;
            control_.receive_poison(message.poison, message.rank, static_cast<int>(message.seq) - 1,
                                    std::string(body, message.bytes));
            return send_poison();
        case MessageKind::ping:
            return send(connection, {0, MessageKind::pong, 0, {}, 0}, {});
        case MessageKind::pong:
            return;
        case MessageKind::silent:
            control_.status(message.rank).silent.store(message.seq != 0 ? 1 : 0, std::memory_order_relaxed);
            return send_to_others(index, message, {});
        case MessageKind::departed:
            control_.receive_arrival(message.rank, message.seq >> 1);
            control_.receive_departure(message.rank, (message.seq & 1) != 0);
            send_to_others(index, message, {});
            if (message.rank == connection.leader && !connection.is_parent)
                ::shutdown(connection.socket.get(), SHUT_WR);  // it waits for this
            return;
        case MessageKind::waits:
            return receive_waits(index, message, body);
        default:
            break;
    }
    throw invalid_message();
}

void TcpLeaders::on_end(Connection& connection) {
    connection.ended = true;
    // Closed by `stop`, so that its number is not reused before.
    Reactor::instance().remove(connection.socket.get());
    ::shutdown(connection.socket.get(), SHUT_RDWR);
    // A leader that has told its departure is answered by this end, perhaps before it has come to `stop`.
    const bool leaves = stopped_ || control_.has_left(here_[0]);
    if (!leaves && !control_.has_left(connection.leader)) control_.lost(connection.leader, "its connection has ended");
}

void TcpLeaders::send_to_others(size_t except, const Message& message, const std::string& body) {
    const Lock lock(*this);
    for (size_t i = 0; i < connections_.size(); ++i)
        if (i != except) send(connections_[i], message, body);
}

/// A peer that no longer reads counts as lost: its own callback sees the end of the connection.
void TcpLeaders::send(Connection& connection, Message message, const std::string& body) {
    if (!connection.socket || connection.ended) return;
    message.bytes = static_cast<uint32_t>(body.size());
    const std::string data = std::string(reinterpret_cast<const char*>(&message), sizeof message) + body;
    if (!send_or_receive(connection, data)) ::shutdown(connection.socket.get(), SHUT_RDWR);
}

/// Receives while it cannot send: the other leader may also be sending, and would wait for this one to receive. Returns
/// false if the other end is gone, or has not taken the bytes for a while.
bool TcpLeaders::send_or_receive(Connection& connection, const std::string& data) {
    const int socket = connection.socket.get();
    for (size_t at = 0; at < data.size();) {
        const ssize_t sent = ::send(socket, data.data() + at, data.size() - at, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0) {
            at += static_cast<size_t>(sent);
            continue;
        }
        if (errno == EINTR) continue;
        if (errno != EAGAIN) return false;
        pollfd ready{socket, POLLIN | POLLOUT, 0};
        const int found = ::poll(&ready, 1, control_.poisoned() ? farewell_ms : patience_ms);
        if (found == 0 || (found < 0 && errno != EINTR)) return false;
        if ((ready.revents & POLLIN) != 0 && !receive(connection, connection.rx_backlog)) return false;
    }
    return true;
}

bool TcpLeaders::all_ended() {
    const std::lock_guard lock(mutex_);
    return std::all_of(connections_.begin(), connections_.end(),
                       [](const Connection& connection) { return !connection.socket || connection.ended; });
}

void TcpLeaders::stop() {
    {
        const std::lock_guard lock(mutex_);
        if (stopped_) return;
        send_news();
        stopped_ = true;
        for (Connection& connection : connections_)
            if (!connection.is_parent) ::shutdown(connection.socket.get(), SHUT_WR);
    }
    // If it were closed at once with unread data, a connection would lose what was just sent.
    const auto deadline = after(1e-3 * (control_.poisoned() ? farewell_ms / 10 : farewell_ms));
    while (!all_ended() && Clock::now() < deadline) ::usleep(500);
    for (const Connection& connection : connections_)
        if (connection.socket) Reactor::instance().remove(connection.socket.get());
    for (const Peer& peer : local_) ignore(peer);
    {
        auto& of_process = TcpLeadersOfProcess::instance();
        const std::lock_guard lock(of_process.mutex);
        of_process.all.erase(this);
    }
    TcpLeadersOfProcess::close(*this);
}

}  // namespace alltoallv
