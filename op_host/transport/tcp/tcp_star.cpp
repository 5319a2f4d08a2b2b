#include "transport/tcp/tcp_star.h"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <utility>

#include "bootstrap/reactor.h"
#include "core/quant_terms.h"

namespace alltoallv {
namespace {

enum MessageType : uint8_t { row_of_one = 1, row_for_one, poisoned, departed };

constexpr auto farewell = std::chrono::seconds(1);

/// A `Row` as it travels, followed by the pairs (all to rank 0, then the one that concerns the receiver) and the
/// payload.
struct WireRow {
    OpKind op;
    DType dtype;
    ReduceOp reduce_op;
    uint8_t flags;
    PairDigests digests;
    int64_t count, root;
    uint64_t payload_bytes;
    PairDifference difference;  // rank 0's finding, once it has all rows; from < 0: none
};

template <class T>
void append(std::string& body, const T* values, size_t count) {
    body.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

size_t payload_bytes(const Row& row) {
    if (row.flags & row_failed) return sizeof(ErrorText);
    if (is_quantized_reduction(row.op)) return sizeof(QuantTerms);
    return (row.flags & row_inline) != 0 ? row.input.bits : 0;
}

WireRow head_of(const Row& row) {
    return {row.op,    row.dtype, row.reduce_op,      row.flags,     row.digests,
            row.count, row.root,  payload_bytes(row), {-1, -1, 0, 0}};
}

}  // namespace

struct TcpStar::Message {
    uint32_t bytes = 0;  // that follow
    MessageType type = departed;
    PoisonKind kind = PoisonKind::none;
    uint16_t reserved = 0;
    int64_t rank = 0;  // whom it is about
    uint64_t seq = 0;

    Message() = default;
    Message(MessageType what, int whom, uint64_t number) : type(what), rank(whom), seq(number) {}
};

/// So that a forked child closes its copies: a connection ends when its owner does.
struct TcpStars {
    std::mutex mutex;
    std::set<TcpStar*> all;

    static TcpStars& instance() {
        static auto* const stars = [] {
            auto* made = new TcpStars;
            pthread_atfork([] { instance().mutex.lock(); }, [] { instance().mutex.unlock(); },
                           [] {
                               for (TcpStar* star : instance().all)
                                   for (TcpStar::Connection& connection : star->connections_) connection.socket.reset();
                               instance().all.clear();
                               instance().mutex.unlock();
                           });
            return made;
        }();
        return *stars;
    }
};

std::shared_ptr<TcpStar> TcpStar::make(std::vector<UniqueFd> sockets, ControlPlane& control) {
    return std::shared_ptr<TcpStar>(new TcpStar(std::move(sockets), control));
}

TcpStar::TcpStar(std::vector<UniqueFd> sockets, ControlPlane& control)
    : control_(control), base_(control.memory()->data()) {
    for (UniqueFd& socket : sockets) connections_.push_back({std::move(socket), {}, false});
}

TcpStar::~TcpStar() {
    stop();
}

void TcpStar::watch() {
    // Before the first callback: it may have to close everything.
    auto& stars = TcpStars::instance();
    {
        const std::lock_guard lock(stars.mutex);
        stars.all.insert(this);
    }
    for (size_t i = 0; i < connections_.size(); ++i) {
        if (!connections_[i].socket) continue;
        Reactor::instance().add(connections_[i].socket.get(), [weak = weak_from_this(), i](uint32_t) {
            if (const auto self = weak.lock()) self->on_bytes(i);
        });
    }
}

void TcpStar::publish(Row& mine, uint64_t seq) {
    const std::lock_guard lock(mutex_);
    if (is_root()) {
        relay(mine, 0, seq);
        mine.seq.store(seq, std::memory_order_release);
        return control_.ring();
    }
    // It counts as published when rank 0 sends it back: all rows are here then only once its finding is, too.
    const WireRow head = head_of(mine);
    std::string body;
    append(body, &head, 1);
    append(body, mine.pairs(), static_cast<size_t>(control_.size()));
    body.append(control_.payload(mine), head.payload_bytes);
    send(0, {row_of_one, control_.rank(), seq}, body);
}

/// Rank 0 hands every rank what concerns it, before it goes by that row itself: it may end at once.
void TcpStar::relay(Row& from, int rank, uint64_t seq) {
    WireRow head = head_of(from);
    head.difference = find_difference(rank, seq);
    const bool divides = (from.flags & row_inline) != 0 && !is_reduction(from.op);
    for (size_t i = 1; i < connections_.size(); ++i) {
        std::string body;
        Pair pair = from.pairs()[i];
        const char* payload = control_.payload(from);
        if (divides) {
            payload += std::exchange(pair.source, 0);
            head.payload_bytes = static_cast<size_t>(pair.send_count) * size_of(from.dtype);
        }
        append(body, &head, 1);
        append(body, &pair, 1);
        body.append(payload, head.payload_bytes);
        send(i, {row_for_one, rank, seq}, body);
    }
}

/// The first pair that disagrees, once all rows have come, the last of them from `newest`; from < 0: none.
PairDifference TcpStar::find_difference(int newest, uint64_t seq) const {
    constexpr PairDifference none{-1, -1, 0, 0};
    uint64_t sent = 0, expected = 0;
    int learning = 0;
    for (int j = 0; j < control_.size(); ++j) {
        const Row& other = row(j, seq);
        const bool here = j == newest || other.seq.load(std::memory_order_acquire) == seq;
        if (!here || (other.flags & row_failed) != 0) return none;
        learning += (other.flags & row_learns) != 0;
        sent += other.digests.sent;
        expected += other.digests.expected;
    }
    if (learning == control_.size() || (learning == 0 && sent == expected)) return none;
    return first_difference(control_.layout(), base_, control_.size(), seq).value_or(none);
}

namespace {

/// Whether what the row says of its payload is so: every region lies in it.
bool fits(const WireRow& head, const char* pairs, size_t count) {
    if ((head.flags & row_inline) == 0 || is_reduction(head.op)) return true;
    for (size_t i = 0; i < count; ++i) {
        Pair pair;
        std::memcpy(&pair, pairs + i * sizeof pair, sizeof pair);
        const size_t room = head.payload_bytes / size_of(head.dtype);
        if (pair.send_count < 0 || static_cast<uint64_t>(pair.send_count) > room) return false;
        const size_t bytes = static_cast<size_t>(pair.send_count) * size_of(head.dtype);
        if (bytes > 0 && static_cast<uint64_t>(pair.source) > head.payload_bytes - bytes) return false;
    }
    return true;
}

}  // namespace

void TcpStar::hear_row(const Message& message, const char* body) {
    WireRow head;
    std::memcpy(&head, body, sizeof head);
    const auto ranks = static_cast<size_t>(control_.size());
    const size_t pairs = message.type == row_of_one ? ranks : 1;
    const auto rank = static_cast<int>(message.rank);
    if (message.bytes != sizeof head + pairs * sizeof(Pair) + head.payload_bytes ||
        head.payload_bytes > control_.layout().inline_bytes() || !fits(head, body + sizeof head, pairs))
        throw peer_lost("it sent a row that nobody understands");
    Row& target = row(rank, message.seq);
    if (rank != control_.rank()) {
        target.op = head.op;
        target.dtype = head.dtype;
        target.reduce_op = head.reduce_op;
        target.flags = head.flags;
        target.digests = head.digests;
        target.count = head.count;
        target.root = head.root;
        target.input.bits = head.payload_bytes;
        body += sizeof head;
        if (pairs == 1) {
            std::fill_n(target.pairs(), ranks, Pair{});
            std::memcpy(target.pairs() + control_.rank(), body, sizeof(Pair));
        } else {
            std::memcpy(target.pairs(), body, pairs * sizeof(Pair));
        }
        std::memcpy(control_.payload(target), body + pairs * sizeof(Pair), head.payload_bytes);
    }
    if (const PairDifference& found = head.difference; !is_root() && found.from >= 0) {
        row(found.from, message.seq).pairs()[found.to].send_count = found.sent;
        row(found.to, message.seq).pairs()[found.from].recv_count = found.expected;
    }
    if (is_root()) relay(target, rank, message.seq);
    target.seq.store(message.seq, std::memory_order_release);
    control_.ring();
}

void TcpStar::tell_poison() {
    const std::lock_guard lock(mutex_);
    const auto poison = control_.poison_told();
    if (!is_root() && poison.by != control_.rank()) return;  // rank 0 knows
    Message message{poisoned, poison.by, 0};
    message.kind = poison.kind;
    for (size_t i = 0; i < connections_.size(); ++i) send(i, message, poison.reason);
}

void TcpStar::on_bytes(size_t index) {
    const std::lock_guard lock(mutex_);
    Connection& connection = connections_[index];
    if (connection.ended) return;
    char chunk[65536];
    bool ended = false;
    for (;;) {
        const ssize_t got = ::recv(connection.socket.get(), chunk, sizeof chunk, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) break;
        if (got <= 0) {
            ended = true;
            break;
        }
        connection.heard.append(chunk, static_cast<size_t>(got));
    }
    size_t at = 0;
    try {
        for (Message message; connection.heard.size() - at >= sizeof message; at += sizeof message + message.bytes) {
            std::memcpy(&message, connection.heard.data() + at, sizeof message);
            if (message.bytes > most_bytes() || message.rank < 0 || message.rank >= control_.size())
                throw peer_lost("it sent a message that nobody understands");
            if (connection.heard.size() - at < sizeof message + message.bytes) break;
            on_message(index, message, connection.heard.data() + at + sizeof message);
        }
        connection.heard.erase(0, at);
    } catch (const Error& error) {
        control_.lost(rank_of(index), error.what());
        ended = true;
    }
    if (ended) on_end(index);
}

size_t TcpStar::most_bytes() const {
    const auto ranks = static_cast<size_t>(control_.size());
    return sizeof(WireRow) + ranks * sizeof(Pair) + control_.layout().inline_bytes();
}

void TcpStar::on_message(size_t connection, const Message& message, const char* body) {
    switch (message.type) {
        case row_of_one:
        case row_for_one:
            if (message.bytes < sizeof(WireRow) || (message.type == row_of_one) != is_root()) break;
            return hear_row(message, body);
        case poisoned:
            return control_.hear_poison(static_cast<PoisonKind>(message.kind), static_cast<int>(message.rank),
                                        std::string(body, message.bytes));
        case departed:
            control_.hear_left(static_cast<int>(message.rank));
            if (!is_root()) return;
            for (size_t i = 0; i < connections_.size(); ++i)
                if (i != connection) send(i, message, {});
            ::shutdown(connections_[connection].socket.get(), SHUT_WR);  // it waits for this
            return;
        default:
            break;
    }
    throw peer_lost("it sent a message that nobody understands");
}

void TcpStar::on_end(size_t index) {
    Connection& connection = connections_[index];
    connection.ended = true;
    Reactor::instance().remove(
        connection.socket.get());  // closed by `stop`, so that its number is not another's before
    ::shutdown(connection.socket.get(), SHUT_RDWR);
    if (stopped_) return;
    if (!is_root() && control_.has_left(0)) return control_.hear_hub_left();
    if (!control_.has_left(rank_of(index))) control_.lost(rank_of(index), "its connection has ended");
}

/// One who takes nothing any more is lost: its own callback sees the end of the connection.
void TcpStar::send(size_t index, Message message, const std::string& body) {
    const Connection& connection = connections_[index];
    if (!connection.socket || connection.ended) return;
    message.bytes = static_cast<uint32_t>(body.size());
    std::string data;
    append(data, &message, 1);
    data += body;
    if (!send_all(connection.socket.get(), data.data(), data.size())) ::shutdown(connection.socket.get(), SHUT_RDWR);
}

bool TcpStar::all_ended() {
    const std::lock_guard lock(mutex_);
    return std::all_of(connections_.begin(), connections_.end(),
                       [](const Connection& connection) { return !connection.socket || connection.ended; });
}

void TcpStar::stop() {
    {
        const std::lock_guard lock(mutex_);
        if (std::exchange(stopped_, true)) return;
        for (size_t i = 0; i < connections_.size(); ++i) {
            send(i, {departed, control_.rank(), 0}, {});
            if (is_root() && connections_[i].socket) ::shutdown(connections_[i].socket.get(), SHUT_WR);
        }
    }
    // Closed at once, with something unread, a connection would lose what has just been sent.
    const auto deadline = std::chrono::steady_clock::now() + (control_.poisoned() ? farewell / 10 : farewell);
    while (!all_ended() && std::chrono::steady_clock::now() < deadline) ::usleep(500);
    for (Connection& connection : connections_)
        if (connection.socket) Reactor::instance().remove(connection.socket.get());
    {
        auto& stars = TcpStars::instance();
        const std::lock_guard lock(stars.mutex);
        stars.all.erase(this);
    }
    for (Connection& connection : connections_) connection.socket.reset();
}

}  // namespace alltoallv
