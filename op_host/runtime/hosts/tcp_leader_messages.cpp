// The messages between leaders about rows and waits.
#include <algorithm>
#include <cstring>

#include "runtime/control/deadlock.h"
#include "runtime/control/peer_words.h"
#include "runtime/core/peer_names.h"
#include "runtime/core/quant_terms.h"
#include "runtime/hosts/tcp_leaders.h"

namespace alltoallv {
namespace {

constexpr int64_t fresh_ns = 10'000'000'000;  // in this time clocks of two hosts drift apart by less than a look

/// A `Row` on the wire, followed by the pairs and the part of the payload that concern the receiver and those to whom
/// it forwards them: everything on the way to rank 0.
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

/// True if the row's description of its payload is right: every known region lies in it.
bool fits(const WireRow& head, const std::vector<Pair>& pairs) {
    if (!divides(head)) return true;
    const uint64_t end = head.payload_at + head.payload_bytes;
    return std::all_of(pairs.begin(), pairs.end(), [&](const Pair& pair) {
        if (pair.send_count == 0) return true;
        const auto at = static_cast<uint64_t>(pair.source), count = static_cast<uint64_t>(pair.send_count);
        return pair.send_count > 0 && at >= head.payload_at && at <= end && count <= (end - at) / size_of(head.dtype);
    });
}

}  // namespace

Error TcpLeaders::invalid_message() {
    return peer_lost("it sent an invalid message");
}

/// Largest body: two rows of every rank, or the waits of one.
size_t TcpLeaders::most_bytes() const {
    const auto ranks = static_cast<size_t>(control_.size());
    return 2 * ranks * (sizeof(WireRow) + ranks * sizeof(Pair) + control_.layout().inline_bytes()) + sizeof(WaitBoard);
}

void TcpLeaders::send_new_rows() {
    Rows rows;
    for (const int j : here_) {
        uint64_t& sent = rows_sent_[static_cast<size_t>(j)];
        while (row(j, sent + 1).seq.load(std::memory_order_acquire) == sent + 1) rows.emplace_back(j, ++sent);
    }
    if (!rows.empty()) send_rows(rows, nobody);
}

void TcpLeaders::send_rows(const Rows& rows, size_t except) {
    for (size_t i = 0; i < connections_.size(); ++i) {
        if (i == except) continue;
        std::string body;
        for (const auto& [rank, seq] : rows) append_row(body, rank, seq, connections_[i]);
        send(connections_[i], {0, MessageKind::rows, 0, {}, rows.size()}, body);
    }
}

void TcpLeaders::append_row(std::string& body, int rank, uint64_t seq, const Connection& to) const {
    Row& from = row(rank, seq);
    WireRow head{
        rank,       seq,       from.op,           from.dtype, from.reduce_op,     from.flags, from.balance, from.count,
        from.terms, from.root, from.shape_digest, 0,          payload_bytes(from)};
    const size_t most = control_.layout().inline_bytes();
    head.payload_bytes = std::min(head.payload_bytes, most);  // as all healthy ranks announce
    if (!to.is_parent && divides(head) &&
        is_known(head.dtype)) {  // from the first of the regions for these ranks to the last of them
        uint64_t begin = head.payload_bytes, end = 0;
        for (const int j : to.ranks) {
            const Pair pair = RowWords(from, j).pair;
            if (pair.send_count == 0) continue;
            const auto at = std::min<uint64_t>(static_cast<uint64_t>(pair.source), most);
            const auto count = std::min<uint64_t>(static_cast<uint64_t>(pair.send_count), most);
            begin = std::min(begin, at);
            end = std::max(end, std::min(at + count * size_of(head.dtype), most));
        }
        head.payload_at = end > 0 ? begin : 0;
        head.payload_bytes = end - head.payload_at;
    }
    append(body, &head, 1);
    if (to.is_parent)
        append(body, from.pairs(), static_cast<size_t>(control_.size()));
    else
        for (const int j : to.ranks) append(body, from.pairs() + j, 1);
    body.append(control_.payload(from) + head.payload_at, head.payload_bytes);
}

void TcpLeaders::receive_rows(size_t connection, const Message& message, const char* body) {
    const char* const end = body + message.bytes;
    const auto take = [&](void* to, size_t bytes) {
        if (static_cast<size_t>(end - body) < bytes) throw invalid_message();
        std::memcpy(to, body, bytes);
        body += bytes;
    };
    const Connection& from = connections_[connection];
    Rows rows;
    for (uint64_t i = 0; i < message.seq; ++i) {
        WireRow head;
        take(&head, sizeof head);
        const auto rank = static_cast<int>(head.rank);
        if (!comes_over(from, head.rank)) throw invalid_message();
        std::vector<Pair> pairs(static_cast<size_t>(control_.size()));
        for (int j = 0; j < control_.size(); ++j)
            if (!from.is_parent || !comes_over(from, j)) take(&pairs[static_cast<size_t>(j)], sizeof(Pair));
        const size_t most = control_.layout().inline_bytes();
        if (!is_known(head.dtype) || head.payload_at > most || head.payload_bytes > most - head.payload_at ||
            !fits(head, pairs))
            throw invalid_message();
        Row& target = row(rank, head.seq);
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
        rows.emplace_back(rank, head.seq);
    }
    // Before this host acts on them, because its leader may end at once.
    send_rows(rows, connection);
    for (const auto& [rank, seq] : rows) row(rank, seq).seq.store(seq, std::memory_order_release);
    for (const auto& [rank, seq] : rows) control_.receive_rows(seq);
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
