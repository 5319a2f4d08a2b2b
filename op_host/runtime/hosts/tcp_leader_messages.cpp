// What leaders say of rows, agreement and waits.
#include <algorithm>
#include <cstring>

#include "runtime/control/deadlock.h"
#include "runtime/control/peer_words.h"
#include "runtime/core/peer_names.h"
#include "runtime/hosts/tcp_leaders.h"

namespace alltoallv {
namespace {

constexpr int64_t fresh_ns = 10'000'000'000;  // in this time clocks of two hosts drift apart by less than a look

/// A `Row` on the wire, followed by the pairs and the part of the payload that concern ranks behind the receiver.
struct WireRow {
    int64_t rank;
    uint64_t seq;
    OpKind op;
    DType dtype;
    uint8_t flags;
    int32_t root;
    uint32_t pairs, payload_at, payload_bytes;
};

/// Where a row says something of a rank, which is not zero.
struct WirePair {
    int32_t to;
    uint32_t source;  // in the payload
    int64_t count;
};

/// The time when a leader sends waits: its clock, the receiver's clock as last received, and when that was.
struct Clocks {
    int64_t now, heard, heard_at;
};

template <class T>
void append(std::string& body, const T* values, size_t count) {
    body.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

/// True if each peer has its own region in the payload.
bool divides(OpKind op, uint8_t flags) {
    return (flags & row_inline) != 0 && !is_reduction(op);
}

/// True if a pair lies in the payload that has come.
bool fits(const WireRow& head, const WirePair& pair) {
    if (pair.count < 0) return false;
    if (!divides(head.op, head.flags)) return true;
    const uint64_t end = uint64_t{head.payload_at} + head.payload_bytes;
    return pair.source >= head.payload_at && pair.source <= end &&
           static_cast<uint64_t>(pair.count) <= (end - pair.source) / size_of(head.dtype);
}

}  // namespace

Error TcpLeaders::not_understood() {
    return peer_lost("it sent a message that nobody understands");
}

/// Largest body: two rows of every rank, the waits of one, or what leaders agree about.
size_t TcpLeaders::most_bytes() const {
    const auto ranks = static_cast<size_t>(control_.size());
    return 2 * ranks * (sizeof(WireRow) + ranks * sizeof(WirePair) + control_.layout().inline_bytes()) +
           sizeof(WaitBoard) + TreeAgreement::most_body;
}

void TcpLeaders::tell_rows() {
    while (rows_told_ < agreement_.next() && has_rows(agreement_.next())) {
        rows_told_ = agreement_.next();
        send_rows(rows_here(rows_told_, true), nobody, {});
        agreement_.publish(rows_told_);
    }
}

/// Returns the rows of this host that bring data, or counts that their peers learn; or the others.
TcpLeaders::Rows TcpLeaders::rows_here(uint64_t seq, bool bring) const {
    Rows rows;
    for (const int j : here_) {
        const uint8_t flags = read_once(row(j, seq).flags);
        if ((flags & row_failed) == 0 && bring == ((flags & (row_inline | row_learns)) != 0)) rows.emplace_back(j, seq);
    }
    return rows;
}

/// Of rows that bring nothing to those behind a neighbour, nothing is sent there.
void TcpLeaders::send_rows(const Rows& rows, size_t except, const TreeAgreement::Ranks& learners) {
    for (size_t i = 0; i < connections_.size(); ++i) {
        if (i == except) continue;
        std::string body;
        uint64_t sent = 0;
        for (const auto& [rank, seq] : rows)
            if (append_row(body, rank, seq, connections_[i], learners)) ++sent;
        if (sent > 0) send(connections_[i], {0, Tells::rows, 0, {}, sent}, body);
    }
}

/// With `learners`, only the counts for these ranks.
bool TcpLeaders::append_row(std::string& body, int rank, uint64_t seq, const Connection& to,
                            const TreeAgreement::Ranks& learners) const {
    Row& from = row(rank, seq);
    const OpKind op = read_once(from.op);
    const uint8_t flags = read_once(from.flags);
    const auto most = static_cast<uint32_t>(control_.layout().inline_bytes());
    const bool packed = (flags & row_inline) != 0;
    WireRow head{rank, seq, op, read_once(from.dtype), flags, static_cast<int32_t>(read_once(from.root)), 0, 0, 0};
    std::vector<WirePair> pairs;
    if (is_reduction(op)) {
        if (!packed || (op == OpKind::reduce && !comes_over(to, head.root))) return false;
        head.payload_bytes = static_cast<uint32_t>(std::min<uint64_t>(read_once(from.input).bits, most));
        if (head.payload_bytes == 0) return false;
    } else {
        uint64_t begin = most, end = 0;  // from the first of the regions for these ranks to the last of them
        for (const int j : to.ranks) {
            const Pair pair = RowWords(from, j).pair;
            if (pair.send_count == 0 || (!learners.empty() && !TreeAgreement::has(learners, j))) continue;
            const auto at = static_cast<uint32_t>(std::min<uint64_t>(static_cast<uint64_t>(pair.source), most));
            pairs.push_back({j, packed ? at : 0, pair.send_count});
            const auto count = std::min<uint64_t>(static_cast<uint64_t>(pair.send_count), most);
            begin = std::min<uint64_t>(begin, at);
            end = std::max<uint64_t>(end, std::min<uint64_t>(at + count * size_of(head.dtype), most));
        }
        if (pairs.empty()) return false;
        head.pairs = static_cast<uint32_t>(pairs.size());
        if (packed && is_known(head.dtype)) {
            head.payload_at = static_cast<uint32_t>(begin);
            head.payload_bytes = static_cast<uint32_t>(end - begin);
        }
    }
    append(body, &head, 1);
    append(body, pairs.data(), pairs.size());
    body.append(control_.payload(from) + head.payload_at, head.payload_bytes);
    return true;
}

void TcpLeaders::hear_rows(size_t connection, const Message& message, const char* body) {
    const char* const end = body + message.bytes;
    const auto take = [&](void* to, size_t bytes) {
        if (static_cast<size_t>(end - body) < bytes) throw not_understood();
        if (bytes > 0) std::memcpy(to, body, bytes);
        body += bytes;
    };
    const Connection& from = connections_[connection];
    Rows rows;
    for (uint64_t i = 0; i < message.seq; ++i) {
        WireRow head;
        take(&head, sizeof head);
        const auto rank = static_cast<int>(head.rank);
        const size_t most = control_.layout().inline_bytes();
        if (!comes_over(from, head.rank) || !is_known(head.dtype) || head.payload_at > most ||
            head.payload_bytes > most - head.payload_at || head.pairs > static_cast<uint32_t>(control_.size()) ||
            head.seq < agreement_.next() || head.seq > agreement_.next() + 1)
            throw not_understood();
        Row& target = row(rank, head.seq);
        std::fill_n(target.pairs(), control_.size(), Pair{});
        for (uint32_t k = 0; k < head.pairs; ++k) {
            WirePair pair;
            take(&pair, sizeof pair);
            if (pair.to < 0 || pair.to >= control_.size() || comes_over(from, pair.to) || !fits(head, pair))
                throw not_understood();
            target.pairs()[pair.to] = {pair.count, static_cast<int64_t>(pair.source), 0, 0};
        }
        target.op = head.op;
        target.dtype = head.dtype;
        target.flags = head.flags;
        target.root = head.root;
        target.input.bits = head.payload_at + head.payload_bytes;
        take(control_.payload(target) + head.payload_at, head.payload_bytes);
        rows.emplace_back(rank, head.seq);
    }
    send_rows(rows, connection, {});
    for (const auto& [rank, seq] : rows) row(rank, seq).seq.store(seq, std::memory_order_release);
}

Summary TcpLeaders::summary(uint64_t seq) {
    Summary all;
    for (const int j : here_) all.add(summary_of(control_.facts(j, seq), row(j, seq).balance, control_.checks()));
    return all;
}

FailedRow TcpLeaders::failure(uint64_t seq, uint64_t called) {
    FailedRow first;
    for (const int j : here_) {
        const RowFacts facts = control_.facts(j, seq);
        if ((facts.flags & row_failed) == 0) continue;
        first.add(failure_of(facts, *reinterpret_cast<const ErrorText*>(control_.payload(row(j, seq))), called));
    }
    return first;
}

std::optional<RowFacts> TcpLeaders::facts(uint64_t seq, int rank) {
    if (!is_here(rank)) return {};
    return control_.facts(rank, seq);
}

void TcpLeaders::add_learners(uint64_t seq, TreeAgreement::Ranks& learners) {
    for (const int j : here_)
        if ((row(j, seq).flags & row_learns) != 0)
            learners[static_cast<size_t>(j) / 8] |= static_cast<uint8_t>(1 << j % 8);
}

void TcpLeaders::tell(uint64_t seq, const TreeAgreement::Ranks& learners) {
    send_rows(rows_here(seq, false), nobody, learners);
}

void TcpLeaders::add_pairs(uint64_t seq, TreeAgreement::Search& search) {
    for (const int here : here_) {
        const Row& from = row(here, seq);
        for (int j = 0; j < control_.size(); ++j) {
            const Pair pair = RowWords(from, j).pair;
            search.sends(here, j, pair.send_count);
            search.expects(j, here, pair.recv_count);
        }
    }
}

void TcpLeaders::add_pair(uint64_t seq, int from, int to, TreeAgreement::PairReport& report) {
    if (is_here(from)) {
        const RowFacts facts = control_.facts(from, seq);
        report.op = facts.op;
        report.row = facts.count;
        report.sent = RowWords(row(from, seq), to).pair.send_count;
    }
    if (is_here(to)) report.expected = RowWords(row(to, seq), from).pair.recv_count;
}

void TcpLeaders::send(size_t neighbour, const TreeAgreement::Header& header, const std::string& body) {
    send(connections_[neighbour], {0, Tells::agreement, 0, {}, header.seq},
         std::string(reinterpret_cast<const char*>(&header), sizeof header) + body);
}

/// The others are told before, because this process may end as soon as its own rank has all that it waits for.
void TcpLeaders::heard(size_t neighbour, uint64_t seq, const Summary& summary, bool of_all) {
    flush_all();
    NewsOfNeighbour& news = news_.of(neighbour);
    news.said[seq & 1] = {summary, of_all ? 1u : 0u};
    news.heard.store(seq, std::memory_order_release);
    control_.hear_rows(seq);
}

void TcpLeaders::decided(uint64_t seq, const std::optional<Verdict>& verdict) {
    flush_all();
    SaidVerdict& said = news_.verdict(seq);
    said.fails = verdict ? 1 : 0;
    if (verdict) {
        said.unmet = verdict->unmet ? 1 : 0;
        said.kind = verdict->error.kind();
        said.code = verdict->error.code();
        copy_text(said.text, sizeof said.text, verdict->error.what());
    }
    said.seq.store(seq, std::memory_order_release);
    if (verdict) control_.ring();
}

/// Sends what the ranks of this host wait for, and what they know of others, and forwards what it receives.
/// A leader that is silent is told no more, or what it does not take would pile up; a board changes all the time.
void TcpLeaders::tell_waits() {
    for (int j = 0; j < control_.size(); ++j) {
        const uint64_t version = control_.board(j).version.load(std::memory_order_acquire);
        if (version == std::exchange(waits_told_[static_cast<size_t>(j)], version)) continue;
        const std::vector<WaitRecord> records = read(control_.board(j));
        for (Connection& connection : connections_) {
            if (comes_over(connection, j)) continue;
            if (control_.status(connection.leader).silent.load(std::memory_order_relaxed) != 0) continue;
            const Clocks clocks{now_ns(), connection.its_clock, connection.told_ns};
            std::string body;
            append(body, &clocks, 1);
            append(body, records.data(), records.size());
            send(connection, {0, Tells::waits, j, {}, 0}, body);
        }
    }
}

/// The other clock is ahead of this one by at most its time less the time of arrival, and by at least what it knew of
/// this clock less the time of that. With these bounds a state lasts no longer here than it did there.
void TcpLeaders::hear_waits(size_t index, const Message& message, const char* body) {
    Connection& connection = connections_[index];
    Clocks clocks;
    if (message.bytes < sizeof clocks || (message.bytes - sizeof clocks) % sizeof(WaitRecord) != 0 ||
        (message.bytes - sizeof clocks) / sizeof(WaitRecord) > WaitBoard::most_records ||
        !comes_over(connection, message.rank))
        throw not_understood();
    std::memcpy(&clocks, body, sizeof clocks);
    connection.its_clock = clocks.now;
    connection.told_ns = now_ns();
    if (clocks.heard == 0 || clocks.now - clocks.heard_at > fresh_ns) return;
    std::vector<WaitRecord> records((message.bytes - sizeof clocks) / sizeof(WaitRecord));
    if (!records.empty()) std::memcpy(records.data(), body + sizeof clocks, records.size() * sizeof(WaitRecord));
    for (WaitRecord& record : records) {
        record.since_ns += connection.told_ns - clocks.now;
        record.seen_ns += clocks.heard - clocks.heard_at;
    }
    write(control_.board(message.rank), records);
    if (connections_.size() > 1) tell_waits();
}

}  // namespace alltoallv
