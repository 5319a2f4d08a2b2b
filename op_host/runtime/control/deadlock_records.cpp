// Records of waits: on a board, and in words.
#include <algorithm>
#include <cstring>
#include <deque>
#include <set>

#include "runtime/control/deadlock.h"
#include "runtime/control/peer_words.h"

namespace alltoallv {

void write(WaitBoard& board, const std::vector<WaitRecord>& records) {
    const uint64_t version = board.version.load(std::memory_order_relaxed);
    board.version.store(version + 1, std::memory_order_relaxed);
    board.records.store(records.size(), std::memory_order_release);
    const size_t words = records.size() * sizeof(WaitRecord) / sizeof(uint64_t);
    for (size_t i = 0; i < words; ++i) {
        uint64_t word;
        std::memcpy(&word, reinterpret_cast<const char*>(records.data()) + i * sizeof word, sizeof word);
        board.words[i].store(word, std::memory_order_release);
    }
    board.version.store(version + 2, std::memory_order_release);
}

std::vector<WaitRecord> read(const WaitBoard& board) {
    const uint64_t version = board.version.load(std::memory_order_acquire);
    const uint64_t count = std::min<uint64_t>(board.records.load(std::memory_order_acquire), WaitBoard::most_records);
    std::vector<WaitRecord> records(count);
    for (size_t i = 0; i < count * sizeof(WaitRecord) / sizeof(uint64_t); ++i) {
        const uint64_t word = board.words[i].load(std::memory_order_acquire);
        std::memcpy(reinterpret_cast<char*>(records.data()) + i * sizeof word, &word, sizeof word);
    }
    if (version % 2 != 0 || board.version.load(std::memory_order_relaxed) != version) return {};
    for (WaitRecord& record : records) {
        record.ranks = std::min<uint16_t>(record.ranks, WaitRecord::most_ranks);
        record.domain[sizeof record.domain - 1] = 0;
    }
    return records;
}

namespace {

using Step = std::pair<const WaitRecord*, WaitRecord::For>;

/// Returns the shortest path from the wait `from` through the waits `all` back to its process, or as far as it goes.
std::vector<Step> way_back(const WaitRecord& from, const std::vector<WaitRecord>& all) {
    std::deque<std::vector<Step>> ways;
    std::set<const WaitRecord*> seen;
    const auto add = [&](const std::vector<Step>& way, const WaitRecord& next) {
        if (!seen.insert(&next).second) return;
        for (const WaitRecord::For& whom : missing_of(next)) {
            ways.push_back(way);
            ways.back().emplace_back(&next, whom);
        }
    };
    add({}, from);
    for (; !ways.empty(); ways.pop_front()) {
        const std::vector<Step> way = ways.front();
        const WaitRecord::For whom = way.back().second;
        const auto is = [&whom](const WaitRecord& record) { return record.process == whom.process; };
        // For ranks that are threads of one process, waits with the same rank number count as the same thread.
        const auto same = [&](const WaitRecord& record) { return is(record) && record.rank == whom.rank; };
        const bool threads = whom.process == way.back().first->process && std::ranges::any_of(all, same);
        if (threads ? same(from) : is(from)) return way;
        for (const WaitRecord& next : all)
            if (threads ? same(next) : is(next)) add(way, next);
    }
    return {{&from, from.missing[0]}};
}

}  // namespace

std::string chain_text(const WaitRecord& from, const std::vector<WaitRecord>& all) {
    std::string text = "ranks wait for each other: rank " + std::to_string(from.rank) + " waits";
    int64_t expected = from.rank;
    for (const auto& [record, whom] : way_back(from, all)) {
        if (record != &from) text += ", which waits";
        if (record->rank != expected) text += " as rank " + std::to_string(record->rank);
        text += " in " + (is_message(record->op) ? "" : "operator #" + std::to_string(record->seq) + " ") +
                std::string(name_of(record->op)) + " of domain '" + peer_text(record->domain, sizeof record->domain) +
                "' for rank " + std::to_string(whom.rank);
        expected = whom.rank;
    }
    return text;
}

}  // namespace alltoallv
