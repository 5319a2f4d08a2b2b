// The flight recorder: each rank keeps its last operators in the control segment, where every peer can read them.
#include <algorithm>
#include <string>
#include <vector>

#include "comm/control.h"

namespace alltoallv {
namespace {

enum FlightState : uint64_t { flight_running, flight_done, flight_failed };

constexpr const char* state_names[] = {"running", "done", "failed"};

uint64_t nanoseconds(Clock::time_point time) {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count());
}

/// A JSON string; a domain's name may hold any byte.
std::string quoted(const std::string& text) {
    std::string json = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') json += '\\';
        if (static_cast<unsigned char>(c) < 0x20) {
            json += ' ';
        } else {
            json += c;
        }
    }
    return json + '"';
}

void append_field(std::string& json, const char* name, uint64_t value) {
    json += std::string(", \"") + name + "\": " + std::to_string(value);
}

}  // namespace

void ControlPlane::record_start(DType dtype) {
    FlightEntry& entry = status(rank()).flight[seq_ % flight_length];
    entry.seq.store(seq_, std::memory_order_relaxed);
    entry.what.store(static_cast<uint64_t>(op_) << 16 | static_cast<uint64_t>(dtype) << 8 | flight_running,
                     std::memory_order_relaxed);
    entry.bytes.store(0, std::memory_order_relaxed);
    entry.start_ns.store(nanoseconds(started_), std::memory_order_relaxed);
    entry.end_ns.store(0, std::memory_order_relaxed);
}

void ControlPlane::record_end(bool ok, uint64_t bytes) {
    FlightEntry& entry = status(rank()).flight[seq_ % flight_length];
    if (entry.seq.load(std::memory_order_relaxed) != seq_) return;  // refused before it started
    const uint64_t what = entry.what.load(std::memory_order_relaxed) & ~uint64_t{0xff};
    entry.what.store(what | (ok ? flight_done : flight_failed), std::memory_order_relaxed);
    entry.bytes.store(bytes, std::memory_order_relaxed);
    entry.end_ns.store(nanoseconds(Clock::now()), std::memory_order_relaxed);
}

std::string ControlPlane::flight_record() const {
    std::string json = "{\"domain\": " + quoted(domain()) + ", \"rank\": " + std::to_string(rank()) +
                       ", \"size\": " + std::to_string(size()) + ", \"ranks\": [";
    for (int j = 0; j < size(); ++j) {
        const RankStatus& peer = status(j);
        json += (j > 0 ? ", " : "") + std::string("{\"rank\": ") + std::to_string(j);
        append_field(json, "pid", peer.pid.load(std::memory_order_relaxed));
        json += std::string(", \"left\": ") + (has_left(j) ? "true" : "false") + ", \"operators\": [";
        std::vector<const FlightEntry*> entries;
        for (const FlightEntry& entry : peer.flight)
            if (entry.seq.load(std::memory_order_relaxed) != 0) entries.push_back(&entry);
        std::sort(entries.begin(), entries.end(), [](const FlightEntry* a, const FlightEntry* b) {
            return a->seq.load(std::memory_order_relaxed) < b->seq.load(std::memory_order_relaxed);
        });
        for (size_t i = 0; i < entries.size(); ++i) {
            const uint64_t what = entries[i]->what.load(std::memory_order_relaxed);
            json += (i > 0 ? ", " : "") + std::string("{\"seq\": ") +
                    std::to_string(entries[i]->seq.load(std::memory_order_relaxed));
            json += ", \"operator\": \"" + std::string(name_of(static_cast<OpKind>(what >> 16))) + "\"";
            json += ", \"dtype\": \"" + std::string(name_of(static_cast<DType>(what >> 8 & 0xff))) + "\"";
            json += std::string(", \"state\": \"") + state_names[std::min<uint64_t>(what & 0xff, flight_failed)] + "\"";
            append_field(json, "bytes", entries[i]->bytes.load(std::memory_order_relaxed));
            append_field(json, "start_ns", entries[i]->start_ns.load(std::memory_order_relaxed));
            append_field(json, "end_ns", entries[i]->end_ns.load(std::memory_order_relaxed));
            json += "}";
        }
        json += "]}";
    }
    return json + "]}";
}

}  // namespace alltoallv
