// Handles a rank that fails, dies or writes nonsense, and composes the errors.
#include <algorithm>
#include <cstring>

#include "runtime/base/resources.h"
#include "runtime/control/control.h"
#include "runtime/control/deadlock.h"
#include "runtime/control/liveness.h"
#include "runtime/control/peer_words.h"

namespace alltoallv {

void ControlPlane::fail(OpKind op, const Error& error, bool of_caller) {
    try {
        open(op, DType::uint8, -1);
        publish_failure(error, of_caller);
    } catch (const Error&) {
        // The communicator is poisoned, which the peers notice instead.
    } catch (...) {
        close(false, 0);  // interrupted
        throw;
    }
    close(false, 0);
}

void ControlPlane::publish_failure(const Error& error, bool of_caller) {
    auto& text = *reinterpret_cast<ErrorText*>(payload(own_row_));
    text.kind = static_cast<uint8_t>(error.kind());
    text.code = static_cast<int32_t>(error.code());
    copy_text(text.text, sizeof text.text, error.what());
    own_row_.flags = of_caller ? row_failed | row_of_caller : row_failed;
    note_refusal();
    publish();
}

void ControlPlane::give_up(const Error& error, bool in_the_middle) {
    if (poisoned()) return;
    if (in_the_middle)
        poison_with(error, describe_op());
    else if (!published_)
        publish_failure(error, false);
}

void ControlPlane::poison_with(const Error& error, const std::string& what) {
    const PoisonKind kind = is_memory(error)                       ? PoisonKind::memory
                            : error.kind() == ErrorClass::resource ? PoisonKind::resource
                                                                   : PoisonKind::aborted;
    poison(kind, "rank " + std::to_string(reported_rank(rank())) + " failed in " + what + ": " + error.what());
}

ControlPlane::Poison ControlPlane::received_poison() const {
    const uint64_t poison = header().poison.load(std::memory_order_acquire);
    const PoisonWord word(poison);
    if (word.by < 0 || word.by >= size() || word.lost >= size() || word.kind > PoisonKind::memory)
        return {PoisonKind::lost, rank(), "the control segment is corrupted"};
    const RankStatus& teller = status(word.by);
    return {word.kind, word.by, peer_text(teller.reason, sizeof teller.reason), word.lost,
            word.lost < 0 ? 0 : process_of(word.lost)};
}

Error ControlPlane::poison_error(const std::string& what) const {
    const Poison poison = received_poison();
    if (const Poison loss = poison.process != 0 ? poison : whole().received_poison(); loss.process != 0) {
        Liveness::report(loss.process, loss_text(loss.reason));
        Liveness::tell(loss.process);
    }
    if (poison.kind == PoisonKind::timeout) return comm_timeout(4012, poison.reason);
    if (poison.kind == PoisonKind::deadlock) return deadlock(4013, poison.reason);
    if (poison.kind == PoisonKind::resource)
        return {ErrorClass::resource, ErrorType::RT_FAIL, with_id(5068, what + ": " + poison.reason)};
    if (poison.kind == PoisonKind::memory) return resource_error(5018, what + ": " + poison.reason);
    return peer_lost(poison.kind == PoisonKind::aborted ? 4049 : 4014, what + ": " + poison.reason);
}

/// Before a part throws, its whole must have ended for the same reason: another process of this host may have ended the
/// part, and told only its own whole. Else the whole would end because this rank has failed, which lives.
void ControlPlane::throw_poison() const {
    if (&whole() != this) {
        std::unique_lock lock(poison_mutex_);
        const auto share = share_poison_;
        lock.unlock();
        if (share) share(received_poison());
    }
    const Error error = poison_error(describe_op());
    if (error.kind() == ErrorClass::deadlock)
        Deadlocks::instance().judge(error.what());  // ranks that wait for this one must learn it before it continues
    throw error;
}

void ControlPlane::poison(PoisonKind kind, const std::string& reason) {
    receive_poison(kind, rank(), -1, reason);
}

void ControlPlane::share_poison(std::function<void(const Poison&)> share) {
    {
        const std::lock_guard lock(poison_mutex_);
        share_poison_ = share;
    }
    if (share && poisoned()) share(received_poison());
}

void ControlPlane::receive_poison(PoisonKind kind, int by, int lost, const std::string& reason) {
    std::function<void(const Poison&)> share;
    {
        const std::lock_guard lock(poison_mutex_);
        if (poisoned()) return;
        RankStatus& teller = status(by);
        copy_text(teller.reason, sizeof teller.reason, reason);
        uint64_t expected = 0;
        if (!header().poison.compare_exchange_strong(expected, PoisonWord{kind, lost, by}.bits())) return;
        share = share_poison_;
    }
    ring_all();
    if (on_poison) on_poison();
    const Poison received = received_poison();
    if (received.process != 0) Liveness::report(received.process, loss_text(reason));
    if (share) share(received);
}

void ControlPlane::receive_poison(const Poison& poison) {
    int lost = -1;  // here it may have another number
    for (int j = 0; poison.process != 0 && j < size(); ++j)
        if (process_of(j) == poison.process) lost = j;
    receive_poison(poison.kind, rank(), lost, poison.reason);
}

void ControlPlane::ring_all() {
    doorbell_.ring();
    for (int j = 0; j < size(); ++j) Doorbell(flags(j).messages).ring();
}

void ControlPlane::receive_departure(int peer, bool process_ended) {
    if (process_ended) status(peer).ended.store(1, std::memory_order_relaxed);
    status(peer).state.store(RankState::left, std::memory_order_release);
    ring_all();
}

void ControlPlane::receive_sum(uint64_t seq, const Summary& sum) {
    OtherHosts& others = header().others;
    others.sum[seq & 1] = sum;
    others.seq.store(seq, std::memory_order_release);
    doorbell_.ring_if([&] { return has_all_rows(seq); });
}

/// The number never falls.
void ControlPlane::receive_arrival(int rank, uint64_t seq) {
    std::atomic<uint64_t>& arrived = status(rank).arrived;
    if (arrived.load(std::memory_order_relaxed) < seq) arrived.store(seq, std::memory_order_release);
}

void ControlPlane::receive_mismatch(uint64_t seq, const CountMismatch& difference) {
    header().difference = difference;
    header().compared.store(seq, std::memory_order_release);
    doorbell_.ring();
}

void ControlPlane::lost(int peer, const std::string& how) {
    const std::string loss =
        "rank " + std::to_string(reported_rank(peer)) + " was lost: " + how + "; " + describe_rank(peer);
    receive_poison(PoisonKind::lost, rank(), peer, loss);
    // Others that end after the first one, because of that, or because a launcher ends the job, are not worth a line.
    if (const Poison received = received_poison(); received.lost == peer)
        Liveness::report(received.process, loss_text(loss));
}

void ControlPlane::left_early(int peer) {
    poison(PoisonKind::lost, "rank " + std::to_string(reported_rank(peer)) + " has left domain '" + domain() +
                                 "': " + describe_rank(peer));
}

std::string ControlPlane::loss_text(const std::string& reason) const {
    return "domain '" + whole().domain() + "': " + reason;
}

int64_t ControlPlane::process_of(int peer) const {
    const RankStatus& of = status(peer);
    return Liveness::process(of.place.load(std::memory_order_relaxed), of.pid.load(std::memory_order_relaxed));
}

std::string ControlPlane::end_of(int64_t process) const {
    if (const Poison received = poisoned() ? received_poison() : Poison{};
        received.lost >= 0 && received.process == process)
        return received.reason;
    for (int j = 0; j < size(); ++j)
        if (has_left(j) && status(j).ended.load(std::memory_order_relaxed) != 0 && process_of(j) == process)
            return "its process has ended";
    return {};
}

void ControlPlane::acknowledge_if_idle() {
    if (poisoned() && !active_.load(std::memory_order_seq_cst))
        status(rank()).acked.store(1, std::memory_order_release);
}

void ControlPlane::leave() {
    if (const std::string reason = Deadlocks::instance().reason_to_leave(*this); !reason.empty())
        poison(PoisonKind::deadlock, reason);
    status(rank()).acked.store(1, std::memory_order_release);
    receive_departure(rank(), process_ends.load());
}

Error ControlPlane::broken(int peer, const std::string& how) const {
    return peer_lost(
        4015, describe_op() + ": rank " + std::to_string(reported_rank(peer)) + " published an invalid record: " + how);
}

const char* ControlPlane::payload_of(int peer, int64_t offset, size_t bytes) const {
    const size_t room = layout_.inline_bytes();
    if (bytes > room || static_cast<uint64_t>(offset) > room - bytes)
        throw broken(peer, "its payload is longer than a mailbox");
    return payload(row(peer)) + offset;
}

std::vector<int64_t> ControlPlane::counts_from_peers(DType dtype) const {
    constexpr size_t most_bytes = size_t{1} << 47;  // more than a process can address
    const size_t most = most_bytes / size_of(dtype);
    std::vector<int64_t> counts;
    size_t total = 0;
    for (int j = 0; j < size(); ++j) {
        const auto count =
            has_brought(j) ? static_cast<size_t>(read_once(row(j).pairs()[rank()].send_count)) : size_t{0};
        if (count > most - total)
            throw broken(j, "it sends " + std::to_string(static_cast<int64_t>(count)) + " elements");
        total += count;
        counts.push_back(static_cast<int64_t>(count));
    }
    return counts;
}

}  // namespace alltoallv
