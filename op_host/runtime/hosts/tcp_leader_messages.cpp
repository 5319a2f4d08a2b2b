// The messages between leaders about agreement, rows and waits.
#include <algorithm>
#include <cstring>
#include <set>

#include "runtime/control/deadlock.h"
#include "runtime/control/peer_words.h"
#include "runtime/core/peer_names.h"
#include "runtime/core/quant_terms.h"
#include "runtime/hosts/tcp_leaders.h"

namespace alltoallv {
namespace {

constexpr int64_t fresh_ns = 10'000'000'000;  // in this time clocks of two hosts drift apart by less than a look

/// A `Row` on the wire, followed by the pairs and the part of the payload that concern the receiver and those to whom
/// it forwards them: if all rows are sent, everything on the way to rank 0.
struct WireRow {
    int64_t rank;
    uint64_t seq;
    OpKind op;
    DType dtype;
    ReduceOp reduce_op;
    uint8_t flags;
    uint64_t balance;
    int64_t count, terms;
    int32_t root;
    uint32_t shape_digest;
    uint64_t payload_at, payload_bytes;
    uint64_t pairs;
};

/// The part of a row about rank `to`, if it is not empty.
struct WirePair {
    int64_t to;
    Pair pair;
};

/// The time when a leader sends waits: its clock, the receiver's clock as last received, and when that was.
struct Clocks {
    int64_t now, known, known_at;
};

template <class T>
void append(std::string& body, const T* values, size_t count) {
    body.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

size_t payload_bytes(const Row& row) {
    if (row.flags & row_failed) return sizeof(ErrorText);
    if (is_quantized_reduction(row.op)) return sizeof(QuantTerms);
    return (row.flags & row_inline) != 0 ? read_once(row.input).bits : 0;
}

/// True if each peer has its own region in the payload.
bool divides(const WireRow& head) {
    return (head.flags & (row_inline | row_failed)) == row_inline && !is_reduction(head.op);
}

/// True if the row's description of its payload is right: the region of a pair lies in it.
bool fits(const WireRow& head, const Pair& pair) {
    if (!divides(head) || pair.send_count == 0) return true;
    const uint64_t end = head.payload_at + head.payload_bytes;
    const auto at = static_cast<uint64_t>(pair.source), count = static_cast<uint64_t>(pair.send_count);
    return pair.send_count > 0 && at >= head.payload_at && at <= end && count <= (end - at) / size_of(head.dtype);
}

}  // namespace

Error TcpLeaders::invalid_message() {
    return peer_lost(4032, "it sent an invalid message");
}

/// Largest body: two rows of every rank, or the waits of one.
size_t TcpLeaders::most_bytes() const {
    const auto ranks = static_cast<size_t>(control_.size());
    return 2 * ranks * (sizeof(WireRow) + ranks * sizeof(WirePair) + control_.layout().inline_bytes()) +
           sizeof(Summary) + sizeof(WaitBoard);
}

bool TcpLeaders::has_all_here(uint64_t seq) const {
    return std::all_of(here_.begin(), here_.end(), [&](int j) { return control_.has_row(j, seq); });
}

/// If the others were there before, the ranks of this host may have begun one operator more by now, not two: the other
/// hosts do not begin that without this sum. With no other host nothing keeps the ranks from going on.
void TcpLeaders::send_sums() {
    while (!connections_.empty() && !agreement_.has_own() && has_all_here(agreement_.next())) {
        Summary own;
        for (const int j : here_) own.add(row(j, agreement_.next()), control_.checks());
        agreement_.add_own(own);
    }
}

/// Of failures of one kind the first is enough: see ControlPlane::throw_failure.
void TcpLeaders::send_sum(size_t connection, uint64_t seq, const Summary& sum) {
    Connection& to = connections_[connection];
    std::string body;
    append(body, &sum, 1);
    std::set<std::pair<OpKind, bool>> failures;
    for (int j = 0; j < control_.size() && sum.failed + sum.learning + sum.with_payload > 0; ++j) {
        if (comes_over(to, j) ||
            (!is_here(j) && control_.status(j).carried[seq & 1].load(std::memory_order_relaxed) != seq))
            continue;
        const Row& from = row(j, seq);
        const bool sends = (from.flags & row_failed) != 0
                               ? failures.insert({from.op, (from.flags & row_of_caller) != 0}).second
                               : brings(j, seq, to);
        if (sends) append_row(body, j, seq, to, false);
    }
    send(to, {0, MessageKind::sum, 0, {}, seq}, body);
}

void TcpLeaders::receive_sum(size_t connection, const Message& message, const char* body) {
    const char* const end = body + message.bytes;
    Summary sum;
    if (message.bytes < sizeof sum || message.seq != agreement_.next()) throw invalid_message();
    std::memcpy(static_cast<void*>(&sum), body, sizeof sum);
    body += sizeof sum;
    while (body < end) {
        const int rank = take_row(body, end, message.seq, connections_[connection]);
        control_.status(rank).carried[message.seq & 1].store(message.seq, std::memory_order_release);
    }
    if (!agreement_.receive(connection, message.seq, sum)) throw invalid_message();
    send_sums();
}

void TcpLeaders::receive_absent(size_t connection, const Message& message, const char* body) {
    TreeAgreement::Ranks absent(message.bytes / sizeof(int32_t));
    if (message.bytes % sizeof(int32_t) != 0) throw invalid_message();
    if (!absent.empty()) std::memcpy(absent.data(), body, message.bytes);
    for (const int32_t rank : absent)
        if (!comes_over(connections_[connection], rank)) throw invalid_message();
    if (!agreement_.receive_absent(connection, message.seq, absent)) throw invalid_message();
}

/// True if the row of a rank brings data or counts to ranks behind a connection.
bool TcpLeaders::brings(int rank, uint64_t seq, const Connection& to) const {
    const Row& from = row(rank, seq);
    if (is_reduction(from.op))
        return (from.flags & row_inline) != 0 && from.input.bits > 0 &&
               (from.op != OpKind::reduce || comes_over(to, from.root));
    return (from.flags & (row_inline | row_learns)) != 0 &&
           std::any_of(to.ranks.begin(), to.ranks.end(), [&](int j) { return from.pairs()[j].send_count != 0; });
}

void TcpLeaders::send_rows(const std::vector<int>& ranks, uint64_t seq, size_t except) {
    for (size_t i = 0; i < connections_.size(); ++i) {
        if (i == except) continue;
        std::string body;
        for (const int rank : ranks) append_row(body, rank, seq, connections_[i], true);
        send(connections_[i], {0, MessageKind::rows, 0, {}, seq}, body);
    }
}

/// `whole`: all that it announces, and not only what it brings.
void TcpLeaders::append_row(std::string& body, int rank, uint64_t seq, const Connection& to, bool whole) const {
    Row& from = row(rank, seq);
    WireRow head{
        rank,       seq,       from.op,           from.dtype, from.reduce_op,      from.flags, from.balance, from.count,
        from.terms, from.root, from.shape_digest, 0,          payload_bytes(from), 0};
    const size_t most = control_.layout().inline_bytes();
    head.payload_bytes = std::min(head.payload_bytes, most);  // as all healthy ranks announce
    const bool all = whole && to.is_parent;
    std::vector<WirePair> pairs;
    const auto add = [&](int j) {
        const Pair pair = RowWords(from, j).pair;
        if (whole ? pair != Pair{} : pair.send_count != 0) pairs.push_back({j, pair});
    };
    if (all)
        for (int j = 0; j < control_.size(); ++j) add(j);
    else if (whole || ((from.flags & row_failed) == 0 && !is_reduction(from.op)))
        for (const int j : to.ranks) add(j);
    head.pairs = pairs.size();
    if (!all && divides(head) && is_known(head.dtype)) {  // from the first of the regions to the last of them
        uint64_t begin = head.payload_bytes, end = 0;
        for (const WirePair& wire : pairs) {
            if (wire.pair.send_count == 0) continue;
            const auto at = std::min<uint64_t>(static_cast<uint64_t>(wire.pair.source), most);
            const auto count = std::min<uint64_t>(static_cast<uint64_t>(wire.pair.send_count), most);
            begin = std::min(begin, at);
            end = std::max(end, std::min(at + count * size_of(head.dtype), most));
        }
        head.payload_at = end > 0 ? begin : 0;
        head.payload_bytes = end - head.payload_at;
    }
    append(body, &head, 1);
    append(body, pairs.data(), pairs.size());
    body.append(control_.payload(from) + head.payload_at, head.payload_bytes);
}

/// Writes a row into the segment, but for its number, and returns whose it is.
int TcpLeaders::take_row(const char*& body, const char* end, uint64_t seq, const Connection& from) {
    const auto take = [&](void* to, size_t bytes) {
        if (static_cast<size_t>(end - body) < bytes) throw invalid_message();
        if (bytes > 0) std::memcpy(to, body, bytes);
        body += bytes;
    };
    WireRow head;
    take(&head, sizeof head);
    const size_t most = control_.layout().inline_bytes();
    if (!comes_over(from, head.rank) || head.seq != seq || !is_known(head.dtype) || head.payload_at > most ||
        head.payload_bytes > most - head.payload_at || head.pairs > static_cast<uint64_t>(control_.size()))
        throw invalid_message();
    const auto rank = static_cast<int>(head.rank);
    std::vector<Pair> pairs(static_cast<size_t>(control_.size()));
    for (uint64_t i = 0; i < head.pairs; ++i) {
        WirePair wire;
        take(&wire, sizeof wire);
        if (wire.to < 0 || wire.to >= control_.size() || !fits(head, wire.pair)) throw invalid_message();
        pairs[static_cast<size_t>(wire.to)] = wire.pair;
    }
    Row& target = row(rank, seq);
    target.op = head.op;
    target.dtype = head.dtype;
    target.reduce_op = head.reduce_op;
    target.flags = head.flags;
    target.balance = head.balance;
    target.count = head.count;
    target.terms = head.terms;
    target.root = head.root;
    target.shape_digest = head.shape_digest;
    target.input.bits = head.payload_at + head.payload_bytes;
    std::copy(pairs.begin(), pairs.end(), target.pairs());
    take(control_.payload(target) + head.payload_at, head.payload_bytes);
    return rank;
}

/// All that the ranks behind a connection have announced of the last operator, on which they do not agree.
void TcpLeaders::receive_rows(size_t connection, const Message& message, const char* body) {
    const char* const end = body + message.bytes;
    if (message.seq + 1 != agreement_.next()) throw invalid_message();
    std::vector<int> ranks;
    while (body < end) ranks.push_back(take_row(body, end, message.seq, connections_[connection]));
    // Before this host acts on them, because its leader may end at once.
    send_rows(ranks, message.seq, connection);
    for (const int rank : ranks) control_.receive_row(rank, message.seq);
}

/// Sends what the ranks of this host wait for, and what they know of others, and forwards what it receives.
/// A leader that is silent is told no more, or what it does not take would pile up; a board changes all the time.
void TcpLeaders::send_waits() {
    for (int j = 0; j < control_.size(); ++j) {
        const uint64_t version = control_.board(j).version.load(std::memory_order_acquire);
        if (version == std::exchange(waits_sent_[static_cast<size_t>(j)], version)) continue;
        const std::vector<WaitRecord> records = read(control_.board(j));
        for (Connection& connection : connections_) {
            if (comes_over(connection, j)) continue;
            if (control_.status(connection.leader).silent.load(std::memory_order_relaxed) != 0) continue;
            const Clocks clocks{now_ns(), connection.peer_clock, connection.received_at_ns};
            std::string body;
            append(body, &clocks, 1);
            append(body, records.data(), records.size());
            send(connection, {0, MessageKind::waits, j, {}, 0}, body);
        }
    }
}

/// The other clock is ahead of this one by at most its time less the time of arrival, and by at least what it knew of
/// this clock less the time of that. With these bounds a state lasts no longer here than it did there.
void TcpLeaders::receive_waits(size_t index, const Message& message, const char* body) {
    Connection& connection = connections_[index];
    Clocks clocks;
    if (message.bytes < sizeof clocks || (message.bytes - sizeof clocks) % sizeof(WaitRecord) != 0 ||
        (message.bytes - sizeof clocks) / sizeof(WaitRecord) > WaitBoard::most_records ||
        !comes_over(connection, message.rank))
        throw invalid_message();
    std::memcpy(&clocks, body, sizeof clocks);
    connection.peer_clock = clocks.now;
    connection.received_at_ns = now_ns();
    if (clocks.known == 0 || clocks.now - clocks.known_at > fresh_ns) return;
    std::vector<WaitRecord> records((message.bytes - sizeof clocks) / sizeof(WaitRecord));
    if (!records.empty()) std::memcpy(records.data(), body + sizeof clocks, records.size() * sizeof(WaitRecord));
    for (WaitRecord& record : records) {
        record.since_ns += connection.received_at_ns - clocks.now;
        record.seen_ns += clocks.known - clocks.known_at;
    }
    write(control_.board(message.rank), records);
    if (connections_.size() > 1) send_waits();
}

}  // namespace alltoallv
