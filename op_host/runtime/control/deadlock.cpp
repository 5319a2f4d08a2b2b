#include "runtime/control/deadlock.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <deque>

#include "runtime/control/control.h"

namespace alltoallv {
namespace {

constexpr int64_t between_looks_ns = 50'000'000;
constexpr int64_t together_ns = 100'000'000;  // of waiting, in which a loss on its way ends the wait instead
constexpr double soon = 60;  // seconds: a shorter limit than the others' may be meant to find out who is late
constexpr int64_t hearsay_ns = 3'000'000'000;  // older records of other processes are ignored

/// Returns the number of the last operator that this rank has begun, as far as every thread may know it.
uint64_t last_operator(const ControlPlane& plane) {
    uint64_t last = 0;
    for (const FlightEntry& entry : plane.status(plane.rank()).flight)
        last = std::max(last, entry.seq.load(std::memory_order_relaxed));
    return last;
}

Deadlocks* current = nullptr;

}  // namespace

// Never destroyed; a forked child, which has no communicators, starts anew. The parent's may be locked and is kept.
Deadlocks& Deadlocks::instance() {
    static std::once_flag once;
    std::call_once(once, [] {
        current = new Deadlocks;
        pthread_atfork(nullptr, nullptr, [] {
            auto* const fresh = new Deadlocks;
            fresh->of_parent_ = current;
            current = fresh;
        });
    });
    return *current;
}

void Deadlocks::add(ControlPlane& plane) {
    const std::lock_guard lock(mutex_);
    planes_.insert(&plane);
}

void Deadlocks::remove(ControlPlane& plane) {
    const std::lock_guard lock(mutex_);
    planes_.erase(&plane);
    reasons_.erase(&plane);
    answers_.erase(&plane);
    std::erase_if(waits_, [&](const auto& item) { return item.first.first == &plane; });
}

void Deadlocks::answer_by(const ControlPlane& plane, std::function<void()> answer) {
    const std::lock_guard lock(mutex_);
    answers_[&plane] = std::move(answer);
}

std::string Deadlocks::loss_of(int64_t process) {
    const std::lock_guard lock(mutex_);
    if (process == 0) return {};
    for (const ControlPlane* plane : planes_)
        if (std::string how = plane->end_of(process); !how.empty()) return how;
    return {};
}

void Deadlocks::Wait::note_blocked(OpKind op, const std::vector<int>& missing, double limit, Clock::time_point time,
                                   Clock::time_point since) {
    if (begun_ == Clock::time_point{}) begun_ = std::min(time, since);
    if (time - begun_ < long_wait) return;
    if (!blocked_) blocked_.emplace();
    blocked_->note_blocked(time);
    Deadlocks& all = instance();
    const std::lock_guard lock(all.mutex_);
    const auto [found, fresh] = all.waits_.try_emplace({&plane_, BlockedThread::this_thread()});
    if (fresh) found->second.number = ++all.numbers_;
    WaitRecord& record = found->second.record = WaitRecord{};
    record.process = plane_.process_of(plane_.rank());
    record.limit = limit;
    record.rank = plane_.rank();
    record.seen_ns = static_cast<int64_t>(flight_ns(time));
    record.seq = plane_.seq();
    record.op = op;
    record.ranks = static_cast<uint16_t>(std::min(missing.size(), WaitRecord::most_ranks));
    for (size_t i = 0; i < record.ranks; ++i) record.missing[i] = {plane_.process_of(missing[i]), missing[i]};
    plane_.domain().copy(record.domain, sizeof record.domain - 1);
}

void Deadlocks::Wait::ends() {
    begun_ = {};
    if (!blocked_) return;
    blocked_.reset();
    Deadlocks& all = instance();
    const std::lock_guard lock(all.mutex_);
    all.waits_.erase({&plane_, BlockedThread::this_thread()});
}

bool Deadlocks::due() {
    const std::lock_guard lock(mutex_);
    const int64_t now = now_ns();
    if (waits_.empty() || now < next_look_ns_) return false;
    next_look_ns_ = now + between_looks_ns;
    return true;
}

/// True if every thread that makes calls waits; `state` returns how, `seen` the time until which at least.
bool Deadlocks::stands_still(const std::vector<uint64_t>& callers, std::vector<uint64_t>& state, int64_t& seen) const {
    std::map<uint64_t, BlockedThread::Thread> threads;
    std::set<uint64_t> all(callers.begin(), callers.end());
    for (const BlockedThread::Thread& thread : BlockedThread::threads()) {
        threads[thread.id] = thread;
        if (thread.calls) all.insert(thread.id);
    }
    for (const uint64_t id : all) {
        const auto found = threads.find(id);
        if (found == threads.end() || !found->second.waits) return false;
        state.insert(state.end(), {id, found->second.changes});
        const BlockedThread::Time blocked = found->second.last_blocked;
        if (blocked != BlockedThread::Time::max())
            seen = std::min(seen, blocked == BlockedThread::Time::min() ? 0 : static_cast<int64_t>(flight_ns(blocked)));
    }
    for (const auto& [place, wait] : waits_) {
        if (!all.contains(place.second)) return false;  // the program does not know this thread
        state.push_back(wait.number);
        seen = std::min(seen, wait.record.seen_ns);
    }
    return true;
}

/// True if there are messages under way that no thread waits for.
bool Deadlocks::moves_messages() const {
    int64_t messages = 0;
    for (const ControlPlane* plane : planes_) messages += plane->messages_under_way.load();
    for (const auto& [place, wait] : waits_) messages -= is_message(wait.record.op);
    return messages > 0;
}

void Deadlocks::look(const std::vector<uint64_t>& callers) {
    const std::lock_guard lock(mutex_);
    const int64_t now = now_ns();
    std::vector<uint64_t> state;
    int64_t seen = now;
    if (waits_.empty() || waits_.size() > WaitBoard::most_records || !stands_still(callers, state, seen)) {
        state_.clear();
        return;
    }
    if (state != state_) {
        state_ = std::move(state);
        since_ns_ = now;
    }
    mine_.clear();
    for (const auto& [place, wait] : waits_) {
        WaitRecord& record = mine_.emplace_back(wait.record);
        record.since_ns = since_ns_;
        record.seen_ns = seen;
        record.operators = static_cast<uint32_t>(waits_.size());
        record.moves_messages = moves_messages();
    }
    hear();
    publish();
    judge_known(together_ns);
}

std::string Deadlocks::reason_to_leave(const ControlPlane& plane) {
    const std::lock_guard lock(mutex_);
    const auto found = reasons_.find(&plane);
    return found != reasons_.end() && found->second.first == last_operator(plane) ? found->second.second : "";
}

void Deadlocks::judge(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    for (const ControlPlane* plane : planes_) reasons_[plane] = {last_operator(*plane), reason};
    if (mine_.empty()) return;
    hear();
    judge_known(0);
    mine_.clear();
}

/// Collects the records of the peers that this process waits for, the latest of each process.
void Deadlocks::hear() {
    const int64_t now = now_ns();
    const auto learn = [&](const std::vector<WaitRecord>& records, bool is_own) {
        Known learnt;
        for (const WaitRecord& record : records) {
            if (!is_own && (record.process == mine_[0].process || record.seen_ns > now))
                continue;  // no peer knows that
            Process& process = learnt[record.process];
            process.since_ns = record.since_ns;
            process.seen_ns = record.seen_ns;
            process.records.push_back(record);
        }
        for (auto& [id, process] : learnt) {
            const auto known = known_.find(id);
            if (process.records.size() != process.records[0].operators) continue;
            if (known == known_.end() || known->second.seen_ns < process.seen_ns) known_[id] = std::move(process);
        }
    };
    std::erase_if(known_, [&](const auto& item) { return item.second.seen_ns < now - hearsay_ns; });
    learn(mine_, true);
    for (ControlPlane* plane : planes_)
        for (const WaitRecord& record : mine_)
            if (plane->domain() == record.domain)
                for (const WaitRecord::For& whom : missing_of(record))
                    if (whom.rank < plane->size() && whom.process != mine_[0].process)
                        learn(read(plane->board(static_cast<int>(whom.rank))), false);
}

void Deadlocks::publish() {
    std::vector<WaitRecord> records = mine_;
    for (const auto& [id, process] : known_)
        if (id != mine_[0].process && records.size() + process.records.size() <= WaitBoard::most_records)
            records.insert(records.end(), process.records.begin(), process.records.end());
    for (ControlPlane* plane : planes_) {
        write(plane->board(plane->rank()), records);
        if (plane->hosts) plane->hosts->look();
    }
    for (const auto& [plane, answer] : answers_) answer();
}

/// True if this wait ends by itself: its domain has been told of a loss, or is about to be. A lost communicator does
/// not speak for one that was made in its domain afterwards.
bool Deadlocks::ends_by_loss(const WaitRecord& record) const {
    bool notified = false, usable = false;
    for (const ControlPlane* plane : planes_) {
        if (plane->domain() != record.domain) continue;
        if (plane->poisoned()) {
            notified |= plane->received_poison().kind != PoisonKind::deadlock;
            continue;
        }
        usable = true;
        const auto has_left = [&](int64_t rank) {
            return rank >= 0 && rank < plane->size() && plane->has_left(static_cast<int>(rank));
        };
        if (has_left(record.rank) || std::ranges::any_of(missing_of(record), has_left, &WaitRecord::For::rank))
            return true;
    }
    return notified && !usable;
}

/// True if one of the waits soon ends by a limit that is shorter than the others': by a timeout, which names who is
/// late, and after which the others may go on.
bool Deadlocks::ends_by_itself(const std::vector<WaitRecord>& cycle) {
    const auto [first, last] = std::ranges::minmax_element(cycle, {}, &WaitRecord::limit);
    return first->limit < soon && first->limit < last->limit;
}

void Deadlocks::judge_known(int64_t together) {
    // Processes that wait, in every operator, for a process that also stays in this set.
    Known stuck = known_;
    const auto is_stuck = [&](const WaitRecord& record) {
        return std::ranges::any_of(missing_of(record), [&](const auto& whom) {
            const auto found = stuck.find(whom.process);
            return found != stuck.end() && !(is_message(record.op) && found->second.records[0].moves_messages);
        });
    };
    while (std::erase_if(stuck, [&](const auto& item) { return !std::ranges::all_of(item.second.records, is_stuck); }) >
           0) {
    }
    const int64_t me = mine_[0].process;
    if (!stuck.contains(me)) return;

    // Returns the processes that the waits of `from` lead to.
    const auto reach = [&](int64_t from) {
        std::set<int64_t> reached;
        std::deque<int64_t> next{from};
        for (; !next.empty(); next.pop_front())
            for (const WaitRecord& record : stuck[next.front()].records)
                for (const WaitRecord::For& whom : missing_of(record))
                    if (stuck.contains(whom.process) && reached.insert(whom.process).second)
                        next.push_back(whom.process);
        return reached;
    };
    const std::set<int64_t> closure = reach(me);
    if (!closure.contains(me)) return;
    int64_t since = 0, seen = INT64_MAX;
    std::vector<WaitRecord> cycle;
    for (const int64_t id : closure) {
        const Process& process = stuck[id];
        since = std::max(since, process.since_ns);
        seen = std::min(seen, process.seen_ns);
        if (reach(id).contains(me)) cycle.insert(cycle.end(), process.records.begin(), process.records.end());
    }
    if (seen - since < together) return;  // as far as is known, they did not all wait at one instant, or for so long
    if (std::ranges::any_of(cycle, [this](const WaitRecord& record) { return ends_by_loss(record); })) return;
    if (ends_by_itself(cycle)) return;

    for (ControlPlane* plane : planes_)
        for (const WaitRecord& record : cycle) {
            const bool ours = record.process == me || std::ranges::any_of(missing_of(record), [&](const auto& whom) {
                                  return whom.process == me;
                              });
            if (ours && plane->domain() == record.domain && !plane->poisoned())
                plane->poison(PoisonKind::deadlock, chain_text(record, cycle));
        }
    mine_.clear();
}

}  // namespace alltoallv
