/// \file control.h
/// \brief The control plane of one rank: sequence numbers, agreement, poison, waiting, the flight recorder.
///
/// It moves no payload. A transport opens a row, fills it, publishes it, and after `agree` may read every peer's row.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/error.h"
#include "runtime/base/mapping.h"
#include "runtime/base/processors.h"
#include "runtime/control/deadlock.h"
#include "runtime/control/doorbell.h"
#include "runtime/control/layout.h"
#include "runtime/control/oversubscription.h"
#include "runtime/control/trace.h"
#include "runtime/core/held_lock.h"
#include "runtime/core/hooks.h"
#include "runtime/core/late_warning.h"
#include "runtime/core/options.h"
#include "runtime/core/quant_reduction.h"

namespace alltoallv {

class ControlPlane {
  public:
    /// Takes the zero-filled control segment of a completed bootstrap, which has `inline_bytes` of payload per row.
    /// `on_host`: ranks that use this host's processors; 0 means all.
    ControlPlane(const CommunicatorOptions& options, size_t inline_bytes, std::shared_ptr<Mapping> memory,
                 int on_host = 0);
    ~ControlPlane();
    ControlPlane(const ControlPlane&) = delete;
    ControlPlane& operator=(const ControlPlane&) = delete;

    /// Moves this rank to `state` and waits until every rank has reached it.
    void enter_state(RankState state);

    int rank() const { return options_.rank; }
    int size() const { return options_.size; }
    const std::string& domain() const { return options_.domain; }
    /// Returns a rank's number in messages.
    int reported_rank(int rank) const {
        return options_.names.empty() ? rank : options_.names[static_cast<size_t>(rank)];
    }
    /// This plane carries out parts of the operators of `whole`, from which its ranks have their names: messages name
    /// the operator that was called, and a failure of either is one of both. `share` tells the other one's.
    struct Poison;
    void become_part_of(const ControlPlane& whole) { whole_.store(&whole, std::memory_order_release); }
    void share_poison(std::function<void(const Poison&)> share);
    const Layout& layout() const { return layout_; }
    /// The processors that the ranks may use together; complete once all ranks have joined.
    const CpuSet& cpus() const { return cpus_; }
    /// Their number, limited by the quota.
    int processors() const { return processors_; }
    /// True if every rank has a processor.
    bool has_room() const { return size() <= processors_; }

    /// --- one operator, in this order -----------------------------------------------------------------------
    /// Starts the next operator and returns this rank's row to fill. Throws if poisoned. `timeout` < 0: the default.
    OwnRow& open(OpKind op, DType dtype, double timeout);
    void publish();
    /// Waits for every rank's row, then compares them: throws the same on every rank, before any output is written.
    void agree();
    /// After the data have moved: throws if a rank has refused what this one has agreed to.
    void confirm() {
        if (agreed_ && header().refused.load(std::memory_order_acquire) >= seq_ && is_refused()) throw_disagreement();
    }
    /// Ends the operator, with success or failure. After a poisoning this acknowledges it.
    void close(bool ok, uint64_t bytes);
    /// Publishes a failure instead of an operator, without waiting for the peers. If it is `of_caller`, of the
    /// arguments that this rank was given, it concerns only calls of the same operator: see UnmetFailure.
    void fail(OpKind op, const Error& error, bool of_caller);
    /// This rank cannot continue its operator: announces that in its row, if not published yet, or ends the
    /// communicator if it is `in_the_middle` of the data for which peers wait.
    void give_up(const Error& error, bool in_the_middle);
    /// Ends the communicator because this rank has failed in `what`.
    void poison_with(const Error& error, const std::string& what);

    /// Seconds that an operator waits whose call gives no limit; a change counts from the next one on.
    double timeout() const { return timeout_.load(std::memory_order_relaxed); }
    void set_timeout(double seconds) { timeout_.store(seconds, std::memory_order_relaxed); }

    uint64_t seq() const { return seq_; }
    Row& row(int rank) const { return row(rank, seq_); }
    Row& row(int rank, uint64_t seq) const { return layout_.row(memory_->data(), rank, seq); }  // this or the last
    bool has_row(int rank, uint64_t seq) const { return row(rank, seq).seq.load(std::memory_order_acquire) >= seq; }
    /// True if a rank is known to have begun an operator; the row of a rank of another host may not be here.
    bool has_begun(int rank, uint64_t seq) const;
    /// After agreement: false for a rank of another host whose row is not here, because it brings nothing to this one.
    bool has_brought(int rank) const;
    /// After agreement: what all ranks have announced.
    const Summary& agreed() const { return agreement_; }
    bool checks() const { return options_.check; }
    char* payload(Row& row) const { return layout_.payload(row); }
    char* payload(const OwnRow& row) const { return layout_.payload(*row.shared); }
    PairSteps* steps(Row& row) const { return layout_.steps(row); }
    PairSteps* steps(const OwnRow& row) const { return layout_.steps(*row.shared); }
    Flags& flags(int rank) const { return layout_.flags(memory_->data(), rank); }
    Flags& my_flags() const { return flags(rank()); }
    WaitBoard& board(int rank) const { return layout_.board(memory_->data(), rank); }
    RankStatus& status(int rank) const { return layout_.status(memory_->data(), rank); }
    RingHeader& ring(int from, int to) const { return layout_.ring(memory_->data(), from, to); }
    char* scratch(int rank) const { return layout_.scratch(memory_->data(), rank); }

    /// Stores with release and wakes all sleepers.
    void signal(Flag& flag, uint64_t value) {
        flag.value.store(value, std::memory_order_release);
        doorbell_.ring();
    }

    /// Waits until `ready()`; `missing()` lists the ranks that it waits for. Throws on poison, loss and timeout, so no
    /// wait lasts for ever (ENDS in row_protocol.pml). `for_calls` says that it waits for calls of these ranks, and not
    /// for work that their processes do besides.
    template <class Ready, class Missing>
    void wait(Ready&& ready, Missing&& missing, bool for_calls = true) {
        for (int spins = spins_; spins > 0; --spins) {
            if (ready()) return;
            cpu_pause();
        }
        if (!ready()) wait_on(ready, missing, for_calls);
    }

    /// Waits like `wait`, but `ready` itself sleeps for some milliseconds while there is nothing to do.
    template <class Ready, class Missing>
    void wait_polling(Ready&& ready, Missing&& missing) {
        WaitState state(*this, false);
        state.polls = true;
        while (!ready())
            if (step_due(state)) step(std::function<std::vector<int>()>(missing), state);
    }

    /// Waits until `reached(j)` is true for every rank.
    template <class Reached>
    void wait_ranks(Reached&& reached) {
        int next = 0;
        wait(
            [&] {
                while (next < size() && reached(next)) ++next;
                return next == size();
            },
            [&] {
                std::vector<int> missing;
                for (int j = next; j < size(); ++j)
                    if (!reached(j)) missing.push_back(j);
                return missing;
            });
    }

    /// Waits until `flag(j) >= value` for the ranks that `needed` selects.
    template <class FlagOf, class Needed>
    void wait_flags(FlagOf&& flag_of, uint64_t value, Needed&& needed) {
        wait_ranks(
            [&](int j) { return !needed(j) || flag_of(flags(j)).value.load(std::memory_order_acquire) >= value; });
    }

    /// --- failure --------------------------------------------------------------------------------------------
    bool poisoned() const { return header().poison.load(std::memory_order_acquire) != 0; }
    void throw_if_poisoned() const {
        if (poisoned()) throw_poison();
    }
    /// First cause wins. Wakes all ranks; `on_poison` (set by the transport) informs sleeping processes.
    void poison(PoisonKind kind, const std::string& reason);
    /// The liveness watch reports that a peer's process has ended.
    void lost(int rank, const std::string& how);
    /// A wait has found that a peer has left without what is waited for.
    void left_early(int rank);
    /// Promises not to write to any peer again, unless an operator is running (it then promises when it closes).
    void acknowledge_if_idle();
    void leave();
    /// A transport between hosts reports what it has received about the other hosts.
    void receive_poison(PoisonKind kind, int by, int lost, const std::string& reason);
    /// Takes the end of the whole, or of the part.
    void receive_poison(const Poison& poison);
    void receive_departure(int rank, bool process_ended);
    void receive_row(int rank, uint64_t seq) {
        row(rank, seq).seq.store(seq, std::memory_order_release);
        doorbell_.ring();
    }
    /// Of all other hosts.
    void receive_sum(uint64_t seq, const Summary& sum);
    void receive_arrival(int rank, uint64_t seq);
    void receive_mismatch(uint64_t seq, const CountMismatch& difference);
    struct Poison {
        PoisonKind kind = PoisonKind::none;
        int by = -1;
        std::string reason{};
        int lost = -1;        // the rank that was lost; < 0: none, or unknown
        int64_t process = 0;  // its process, or 0
    };
    Poison received_poison() const;
    /// Returns the error that `what` raises once poisoned.
    Error poison_error(const std::string& what) const;
    void ring() { doorbell_.ring(); }
    /// Wakes all that wait in this domain, also for messages.
    void ring_all();
    bool has_left(int rank) const { return status(rank).state.load(std::memory_order_acquire) == RankState::left; }

    /// Returns the error for a peer that has announced something impossible.
    Error broken(int peer, const std::string& how) const;

    /// Returns the ranks for which a message to or from `peer` waits; < 0 means all others.
    std::vector<int> peers_of(int peer) const;

    /// True if a rank has published its row of this rank's operator, and has not ended the operator.
    bool is_in_operator(int rank) const;

    /// After agreement: returns where a peer's row says that data lie in its payload. Throws if they do not fit.
    const char* payload_of(int peer, int64_t offset, size_t bytes) const;

    /// After agreement: returns how many elements each rank sends to this one. Throws if no memory could hold them.
    std::vector<int64_t> counts_from_peers(DType dtype) const;

    /// Returns "rank 0 waited 2.0 s in `what` for rank 1 (...)"; `waited` is that word, or another.
    std::string describe_wait(const std::string& waited, Clock::time_point since, const std::string& what,
                              const std::vector<int>& ranks) const;
    std::string describe_rank(int rank) const;
    /// Returns the process of a rank, as control/liveness.h numbers it.
    int64_t process_of(int rank) const;
    /// Returns how a process was lost, or that it has ended after its rank had left; empty if it may live.
    std::string end_of(int64_t process) const;
    std::string describe_op(OpKind op) const;
    std::string describe_op() const { return describe_op(op_); }
    std::string flight_record() const;
    Tracer& tracer() { return tracer_; }
    TraceState trace_state(bool ok) const;

    /// The segment itself, for objects that outlive the communicator (quarantined blocks).
    std::shared_ptr<Mapping> memory() const { return memory_; }

    std::function<void()> on_poison;

    std::atomic<int> messages_under_way{0};  // of this rank, in the same domain

    /// Functions that a transport between hosts adds: each host has its own segment.
    struct Hosts {
        std::vector<int> here;                        // the ranks of this one, in order: the leader is the first
        std::function<void(uint64_t seq)> published;  // called when this rank's row is published
        std::function<void()> look;                   // called when this segment has news for the other hosts
        std::function<int(int rank)> cut_off;    // rank that has left and without which `rank` cannot be reached, or -1
        std::function<int(int rank)> hidden_by;  // the rank that does not answer and hides `rank`, or `rank` itself
        std::function<void(uint64_t seq, const CountMismatch&)> counts_compared;  // called by rank 0
    };
    std::optional<Hosts> hosts;

  private:
    struct WaitState {
        WaitState(const ControlPlane& plane, bool calls) : deadlock_wait(plane.whole()), for_calls(calls) {}

        Deadlocks::Wait deadlock_wait;
        const bool for_calls;
        bool polls = false;  // it waits for data of ranks that may have left after sending them
        uint64_t rounds = 0;
        Clock::time_point next_step{};
    };

    static constexpr int spins_with_room = 100;  // pauses, if every rank has a processor
    static constexpr uint64_t yields_per_step = 32;
    static constexpr uint64_t yields_before_sleep = 4096;
    static constexpr int sleep_ms = 50;

    template <class Ready, class Missing>
    void wait_on(Ready&& ready, Missing&& missing, bool for_calls) {
        const auto begun = Clock::now();
        auto now = begun;
        WaitState state(*this, for_calls);
        if (oversubscription_.present()) state.rounds = yields_before_sleep;
        do {
            if (++state.rounds <= yields_before_sleep) {
                if (oversubscription_.yield(now)) state.rounds = yields_before_sleep;
                HeldLock::release_after(now - begun);
                if (state.rounds % yields_per_step != 0) continue;
            } else {
                HeldLock::release_now();
                if (doorbell_.sleep([&] { return ready() || poisoned(); }, sleep_limit()) && !poisoned()) return;
            }
            if (step_due(state)) step(std::function<std::vector<int>()>(missing), state);
        } while (!ready());
    }

    const ControlPlane& whole() const {
        const ControlPlane* const whole = whole_.load(std::memory_order_acquire);
        return whole != nullptr ? *whole : *this;
    }
    ControlHeader& header() const { return layout_.header(memory_->data()); }
    void start_clock(double timeout);
    void populate() const;
    void count_cpus();
    int sleep_limit() const;
    bool step_due(WaitState& state) const;
    void step(const std::function<std::vector<int>()>& missing, WaitState& state);
    [[noreturn]] void throw_poison() const;
    std::string loss_text(const std::string& reason) const;
    void publish_failure(const Error& error, bool of_caller);
    void throw_failure(uint64_t called);
    void compare_rows();
    void note_refusal();
    bool is_refused() const;
    void refuse();
    [[noreturn]] void throw_disagreement();
    bool is_elsewhere(int rank) const {
        return hosts && !std::binary_search(hosts->here.begin(), hosts->here.end(), rank);
    }
    bool has_all_rows(uint64_t seq) const;
    void sum_up();
    CountMismatch find_mismatch();
    void await_rows(uint64_t seq);
    void record_start(DType dtype);
    void record_end(bool ok, uint64_t bytes);
    void trace_end(bool ok, uint64_t bytes, uint64_t now_ns);

    CommunicatorOptions options_;
    std::shared_ptr<Mapping> memory_;
    Layout layout_;
    Doorbell doorbell_;
    Oversubscription oversubscription_;
    CpuSet cpus_{};
    int processors_ = 1;
    int spins_;
    uint64_t seq_ = 0;
    bool settled_ = true;     // all rows of seq_ have been seen
    bool published_ = false;  // this rank's row of seq_ is published
    bool agreed_ = false;     // this rank has agreed to the rows of seq_
    Summary agreement_;       // of all ranks
    OwnRow own_row_{};        // of seq_, which goes into shared memory when it is published
    OpKind op_ = OpKind::none;
    std::atomic<double> timeout_;
    double op_timeout_;
    Clock::time_point started_;
    LateWarning warning_{0, {}};
    std::atomic<bool> active_{false};
    mutable std::mutex poison_mutex_;
    std::function<void(const Poison&)> share_poison_;  // guarded by the mutex
    std::atomic<const ControlPlane*> whole_{nullptr};
    Tracer tracer_;
    TraceRecord* traced_ = nullptr;  // record of the present operator
};

/// Fill a reduction into this rank's row.
void announce(OwnRow& row, int rank, const Reduction& reduction);
void announce(OwnRow& row, const ControlPlane& control, const QuantReduction& reduction);

}  // namespace alltoallv
