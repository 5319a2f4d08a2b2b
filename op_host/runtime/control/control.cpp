#include "runtime/control/control.h"

#include <unistd.h>

#include <algorithm>
#include <bit>

#include "runtime/base/huge_pages.h"
#include "runtime/base/place.h"
#include "runtime/control/deadlock.h"
#include "runtime/control/peer_words.h"

namespace alltoallv {
ControlPlane::ControlPlane(const CommunicatorOptions& options, size_t inline_bytes, std::shared_ptr<Mapping> memory,
                           int on_host)
    : options_(options),
      memory_(std::move(memory)),
      layout_(options.size, inline_bytes),
      doorbell_(layout_.header(memory_->data()).bell),
      oversubscription_(on_host > 0 ? on_host : options.size),
      spins_((on_host > 0 ? on_host : options.size) <= usable_cpus() ? spins_with_room : 0),
      timeout_(options.timeout),
      tracer_(options.domain, options.rank, options.size) {
    start_clock(-1);
    populate();
    RankStatus& own_status = status(rank());
    own_status.place.store(place_number(this_place()), std::memory_order_relaxed);
    own_status.pid.store(static_cast<uint32_t>(getpid()), std::memory_order_relaxed);
    const CpuSet cpus = affinity();
    for (size_t i = 0; i < cpus.size(); ++i) own_status.cpus[i].store(cpus[i], std::memory_order_relaxed);
    Deadlocks::instance().add(*this);
}

ControlPlane::~ControlPlane() {
    Deadlocks::instance().remove(*this);
}

/// Makes resident what every operator touches. Of a small segment, which has no huge page, only the beginnings of the
/// mailboxes: most groups never send more in one, and a job may have hundreds of groups.
void ControlPlane::populate() const {
    constexpr size_t usual_payload = 16 << 10;
    if (layout_.hot() >= HugePages::size) return memory_->populate(0, layout_.hot(), true);
    const auto part = [&](const void* begin, const void* end) {
        memory_->populate_pages(static_cast<size_t>(static_cast<const char*>(begin) - memory_->data()),
                                static_cast<size_t>(static_cast<const char*>(end) - static_cast<const char*>(begin)));
    };
    part(memory_->data(), layout_.payload(row(0, 0)));
    for (int j = 0; j < size(); ++j)
        for (const uint64_t seq : {0, 1})
            part(&row(j, seq), layout_.payload(row(j, seq)) + std::min(usual_payload, layout_.inline_bytes()));
    part(&status(0), memory_->data() + layout_.hot());
}

void ControlPlane::enter_state(RankState state) {
    status(rank()).state.store(state, std::memory_order_release);
    doorbell_.ring();
    wait_ranks([&](int j) { return status(j).state.load(std::memory_order_acquire) >= state; });
    if (state == RankState::joined) count_cpus();  // by now every rank has written its mask
}

/// Counts the processors in all ranks' affinity masks together: a launcher may have bound each rank to one.
void ControlPlane::count_cpus() {
    int together = 0;
    for (size_t i = 0; i < cpus_.size(); ++i) {
        for (int j = 0; j < size(); ++j) cpus_[i] |= status(j).cpus[i].load(std::memory_order_relaxed);
        together += std::popcount(cpus_[i]);
    }
    processors_ = std::min(together, quota_cpus());
    spins_ = has_room() ? spins_with_room : 0;
    oversubscription_.set_cpus(processors_);
}

void ControlPlane::start_clock(double timeout) {
    const ControlPlane& all = whole();
    started_ = &all != this ? all.started_ : Clock::now();
    warning_ = &all != this ? all.warning_ : LateWarning(options_.warn_after, started_);
    op_timeout_ = &all != this ? all.op_timeout_ : timeout < 0 ? this->timeout() : timeout;
}

OwnRow& ControlPlane::open(OpKind op, DType dtype, double timeout) {
    // Sequentially consistent, because of acknowledge_if_idle(): either it sees us active or we see the poison.
    active_.store(true, std::memory_order_seq_cst);
    start_clock(timeout);
    if (header().poison.load(std::memory_order_seq_cst) != 0) {
        ++seq_;
        op_ = op;
        throw_poison();
    }
    if (!settled_) await_rows(seq_);  // ROW in row_protocol.pml
    settled_ = published_ = agreed_ = false;
    ++seq_;
    op_ = op;
    record_start(dtype);
    own_row_.shared = &row(rank());
    own_row_.op = op;
    own_row_.dtype = dtype;
    own_row_.reduce_op = ReduceOp::sum;
    own_row_.flags = 0;
    own_row_.balance = 0;
    own_row_.input = own_row_.output = Location{};
    own_row_.count = own_row_.terms = 0;
    own_row_.root = 0;
    own_row_.shape_digest = 0;
    return own_row_;
}

void ControlPlane::publish() {
    published_ = true;
    Row& row = *own_row_.shared;
    // Field by field: a copy would load more at a time than was stored just now, and so wait for all stores before it.
    write_once(row.dtype, own_row_.dtype);
    write_once(row.op, own_row_.op);
    write_once(row.reduce_op, own_row_.reduce_op);
    write_once(row.flags, own_row_.flags);
    write_once(row.balance, own_row_.balance);
    write_once(row.input, own_row_.input);
    write_once(row.output, own_row_.output);
    write_once(row.count, own_row_.count);
    write_once(row.terms, own_row_.terms);
    write_once(row.root, own_row_.root);
    write_once(row.shape_digest, own_row_.shape_digest);
    row.seq.store(seq_, std::memory_order_release);
    // Every rank waits for all rows: the last one to publish wakes the sleepers, once.
    doorbell_.ring_if([&] { return has_all_rows(seq_); });
    if (hosts) hosts->published(seq_);
}

/// Between hosts: the rows of this one, and the summary of the others.
bool ControlPlane::has_all_rows(uint64_t seq) const {
    if (hosts) {
        const bool alone = static_cast<int>(hosts->here.size()) == size();
        return std::all_of(hosts->here.begin(), hosts->here.end(), [&](int j) { return has_row(j, seq); }) &&
               (alone || header().others.seq.load(std::memory_order_acquire) >= seq);
    }
    for (int j = 0; j < size(); ++j)
        if (!has_row(j, seq)) return false;
    return true;
}

bool ControlPlane::has_begun(int rank, uint64_t seq) const {
    return has_row(rank, seq) || (is_elsewhere(rank) && (header().others.seq.load(std::memory_order_acquire) >= seq ||
                                                         status(rank).arrived.load(std::memory_order_acquire) >= seq));
}

bool ControlPlane::has_brought(int rank) const {
    return has_row(rank, seq_) || status(rank).carried[seq_ & 1].load(std::memory_order_acquire) == seq_;
}

void ControlPlane::await_rows(uint64_t seq) {
    if (hosts) {
        const auto missing = [&] {
            std::vector<int> late;
            for (int j = 0; j < size(); ++j)
                if (!has_begun(j, seq)) late.push_back(j);
            if (late.empty() && !has_all_rows(seq)) late.push_back(hosts->here[0]);  // all have: it passes that on
            return late;
        };
        wait([&] { return has_all_rows(seq); }, missing);
    } else {
        wait_ranks([&](int j) { return has_row(j, seq); });
    }
    settled_ = true;
}

void ControlPlane::agree() {
    const bool timed = traced_ != nullptr && !has_all_rows(seq_);  // the last rank reads no clock
    const auto begun = timed ? Clock::now() : started_;
    await_rows(seq_);
    if (timed) traced_->waited_ns = flight_ns() - flight_ns(begun);
    try {
        compare_rows();
    } catch (const Error&) {
        refuse();
        throw;
    }
    agreed_ = true;
}

void ControlPlane::close(bool ok, uint64_t bytes) {
    record_end(ok, bytes);
    op_ = OpKind::none;
    active_.store(false, std::memory_order_seq_cst);
    if (header().poison.load(std::memory_order_seq_cst) != 0) status(rank()).acked.store(1, std::memory_order_release);
}

/// Returns how long to sleep, in milliseconds: at most until the timeout.
int ControlPlane::sleep_limit() const {
    const double left = op_timeout_ - seconds_since(started_);
    return std::clamp(static_cast<int>(std::min(left, 1.0) * 1000) + 1, 1, sleep_ms);
}

bool ControlPlane::step_due(WaitState& state) const {
    if (poisoned()) return true;
    const auto now = Clock::now();
    if (now < state.next_step) return false;
    state.next_step = now + std::chrono::milliseconds(20);
    return true;
}

void ControlPlane::step(const std::function<std::vector<int>()>& missing, WaitState& state) {
    const auto before = Clock::now();
    const bool ended = poisoned();  // looked at first: what they published before one of them died or aborted counts
    const std::vector<int> late = missing();
    if (late.empty()) return;
    if (ended) throw_poison();
    confirm();
    for (const int j : late) {
        const int gone = has_left(j) ? j : hosts ? hosts->cut_off(j) : -1;
        if (state.polls || gone < 0) continue;
        // Check again: what it published before it left counts.
        for (const int absent : missing()) {
            if (absent != j) continue;
            left_early(gone);
            throw_poison();
        }
    }
    if (const OpKind op = whole().op_; op != OpKind::none && state.for_calls) {
        std::vector<int> ranks;
        for (const int j : late) ranks.push_back(reported_rank(j));
        state.deadlock_wait.note_blocked(op, ranks, op_timeout_, before);
    }
    if (hosts) hosts->look();
    const auto now = Clock::now();
    if (std::chrono::duration<double>(now - started_).count() >= op_timeout_) {
        poison(PoisonKind::timeout, describe_wait("waited", started_, describe_op(), late) + "; the timeout is over");
        throw_poison();
    }
    warning_.look([&](double) { return describe_wait("has waited", started_, describe_op(), late); });
    if (hooks().poll) hooks().poll();
}
}  // namespace alltoallv
