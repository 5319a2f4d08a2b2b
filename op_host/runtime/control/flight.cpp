// The flight recorder: each rank keeps its last operators in the control segment, where every peer can read them.
#include "runtime/control/flight.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "runtime/control/control.h"
#include "runtime/core/peer_names.h"

namespace alltoallv {
namespace {

constexpr const char* state_names[] = {"running", "done", "failed"};

void append_field(std::string& json, const char* name, uint64_t value) {
    json += std::string(", \"") + name + "\": " + std::to_string(value);
}

/// Returns nothing if the entry is unused, or reused meanwhile. The loads acquire, so that they stay in order.
std::optional<FlightOperator> operator_of(const FlightEntry& entry) {
    const uint64_t seq = entry.seq.load(std::memory_order_acquire), what = entry.what.load(std::memory_order_acquire);
    FlightOperator one{seq, static_cast<OpKind>(what >> 40), static_cast<DType>(what >> 8 & 0xffffffff),
                       std::min(static_cast<FlightState>(what & 0xff), FlightState::failed)};
    one.start_ns = entry.start_ns.load(std::memory_order_acquire);
    if (one.state != FlightState::running) {
        one.bytes = entry.bytes.load(std::memory_order_acquire);
        one.end_ns = entry.end_ns.load(std::memory_order_acquire);
    }
    if (seq == 0 || entry.seq.load(std::memory_order_relaxed) != seq) return std::nullopt;
    return one;
}

}  // namespace

std::string json_string(const std::string& text) {
    std::string json = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') json += '\\';
        json += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return json + '"';
}

uint64_t flight_ns(Clock::time_point time) {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count());
}

std::string flight_json(const std::string& domain, int rank, int size, const std::vector<FlightOfRank>& ranks) {
    std::string json = "{\"domain\": " + json_string(domain) + ", \"rank\": " + std::to_string(rank) +
                       ", \"size\": " + std::to_string(size) + ", \"ranks\": [";
    for (size_t j = 0; j < ranks.size(); ++j) {
        json += (j > 0 ? ", " : "") + std::string("{\"rank\": ") + std::to_string(ranks[j].rank);
        append_field(json, "pid", ranks[j].pid);
        json += std::string(", \"left\": ") + (ranks[j].left ? "true" : "false") + ", \"operators\": [";
        for (size_t i = 0; i < ranks[j].operators.size(); ++i) {
            const FlightOperator& one = ranks[j].operators[i];
            json += (i > 0 ? ", " : "") + std::string("{\"seq\": ") + std::to_string(one.seq);
            json += ", \"operator\": \"" + std::string(name_of(one.op)) + "\"";
            json += ", \"dtype\": \"" + peer_name(one.dtype) + "\"";
            json += std::string(", \"state\": \"") + state_names[static_cast<size_t>(one.state)] + "\"";
            append_field(json, "bytes", one.bytes);
            append_field(json, "start_ns", one.start_ns);
            append_field(json, "end_ns", one.end_ns);
            json += "}";
        }
        json += "]}";
    }
    return json + "]}";
}

void ControlPlane::record_start(DType dtype) {
    FlightEntry& entry = status(rank()).flight[seq_ % flight_length];
    entry.seq.store(0, std::memory_order_relaxed);
    entry.what.store(static_cast<uint64_t>(op_) << 40 | static_cast<uint64_t>(dtype) << 8 |
                         static_cast<uint64_t>(FlightState::running),
                     std::memory_order_release);
    entry.start_ns.store(flight_ns(started_), std::memory_order_release);
    entry.seq.store(seq_, std::memory_order_release);
    traced_ = tracer_.begin(seq_, op_, dtype, started_);
}

void ControlPlane::record_end(bool ok, uint64_t bytes) {
    const uint64_t now = flight_ns();
    if (traced_ != nullptr) trace_end(ok, bytes, now);
    FlightEntry& entry = status(rank()).flight[seq_ % flight_length];
    if (entry.seq.load(std::memory_order_relaxed) != seq_) return;  // refused before it started
    const uint64_t what = entry.what.load(std::memory_order_relaxed) & ~uint64_t{0xff};
    entry.bytes.store(bytes, std::memory_order_relaxed);
    entry.end_ns.store(now, std::memory_order_relaxed);
    entry.what.store(what | static_cast<uint64_t>(ok ? FlightState::done : FlightState::failed),
                     std::memory_order_release);
}

bool ControlPlane::is_in_operator(int rank) const {
    if (!has_row(rank, seq_)) return false;
    const FlightEntry& entry = status(rank).flight[seq_ % flight_length];  // which was begun before the row
    return static_cast<FlightState>(entry.what.load(std::memory_order_acquire) & 0xff) == FlightState::running;
}

/// Ends the trace record. A quantized all-reduce announces no counts: its parts are even.
void ControlPlane::trace_end(bool ok, uint64_t bytes, uint64_t now_ns) {
    Row& own_row = row(rank());
    if (ok)
        for (int j = 0; j < size(); ++j)
            traced_->counts()[j] =
                op_ == OpKind::quantized_all_reduce ? own_row.count / size() : own_row.pairs()[j].send_count;
    tracer_.end(*std::exchange(traced_, nullptr), trace_state(ok), bytes, now_ns);
}

/// Returns how an operator or message has ended, for the trace: a job's end is not a failure of what ranks were in.
TraceState ControlPlane::trace_state(bool ok) const {
    if (ok) return TraceState::done;
    const PoisonKind kind = poisoned() ? received_poison().kind : PoisonKind::none;
    return kind == PoisonKind::lost || kind == PoisonKind::aborted ? TraceState::cut_short : TraceState::failed;
}

std::string ControlPlane::flight_record() const {
    std::vector<FlightOfRank> ranks;
    for (int j = 0; j < size(); ++j) {
        const RankStatus& peer = status(j);
        FlightOfRank& one =
            ranks.emplace_back(FlightOfRank{j, peer.pid.load(std::memory_order_relaxed), has_left(j), {}});
        for (const FlightEntry& entry : peer.flight)
            if (const std::optional<FlightOperator> found = operator_of(entry)) one.operators.push_back(*found);
        std::ranges::sort(one.operators, {}, &FlightOperator::seq);
    }
    return flight_json(domain(), rank(), size(), ranks);
}

}  // namespace alltoallv
