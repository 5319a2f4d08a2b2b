// Agreement: every rank compares the same rows and so reaches the same verdict, with the same text (VERDICT in
// row_protocol.pml).
#include <algorithm>
#include <cstring>
#include <string>

#include "runtime/control/control.h"
#include "runtime/control/peer_words.h"
#include "runtime/core/peer_names.h"
#include "runtime/core/quant_terms.h"
#include "runtime/core/token_terms.h"

namespace alltoallv {
namespace {

/// True if the data of both rows move alike: without that, two ranks' counters of a ring or of rounds would go apart,
/// and each later operator would get the data of an earlier one.
bool moves_alike(const Row& a, const Row& b) {
    if (info(a.op).kind != info(b.op).kind || ((a.flags ^ b.flags) & row_moves_nothing) != 0) return false;
    if (a.dtype != b.dtype && (!is_known(a.dtype) || !is_known(b.dtype) || size_of(a.dtype) != size_of(b.dtype)))
        return false;
    if (!has_shape(a.op)) return true;
    return a.op == b.op && a.count == b.count &&
           (!is_quantized_reduction(a.op) || (a.root == b.root && a.dtype == b.dtype));
}

/// Fills in the counts: rank i gives counts_i[j] elements to the part of rank j, which has counts_j[j].
void announce_parts(Row& mine, int rank, std::span<const int64_t> counts, const ShapeWords& shape) {
    const int64_t own = counts[static_cast<size_t>(rank)];
    for (int j = 0; j < static_cast<int>(counts.size()); ++j) {
        const int64_t part = counts[static_cast<size_t>(j)];
        mine.pairs()[j] = {part, shape.words[0], own, shape.words[1]};
        mine.balance += pair_hash(rank, j, part);
        mine.balance -= pair_hash(j, rank, own);
    }
}

}  // namespace

void announce(Row& mine, int rank, const Reduction& r) {
    mine.reduce_op = r.reduce_op;
    mine.root = static_cast<int64_t>(uint64_t{r.shape.digest} << 32 | static_cast<uint32_t>(r.root));
    mine.count = total_count(r);
    if (!r.moves) mine.flags |= row_moves_nothing;
    announce_parts(mine, rank, r.counts, r.shape);
}

void announce(Row& mine, const ControlPlane& control, const QuantReduction& q) {
    const QuantTerms terms = terms_of(q);
    std::memcpy(control.payload(mine), &terms, sizeof terms);
    mine.root = digest(terms);
    mine.reduce_op = q.average ? ReduceOp::avg : ReduceOp::sum;
    mine.count = total_count(q);
    if (!q.moves) mine.flags |= row_moves_nothing;
    const std::vector<int64_t> none(static_cast<size_t>(control.size()));
    announce_parts(mine, control.rank(), q.op == OpKind::quantized_reduce_scatter ? q.counts : none, q.shape);
}

/// Returns the first difference by receiver, then by sender. Rows that learn their counts agree with all.
PairDifference ControlPlane::find_difference() const {
    for (int to = 0; to < size(); ++to) {
        if (row(to).flags & row_learns) continue;
        for (int from = 0; from < size(); ++from) {
            const int64_t sent = row(from).pairs()[to].send_count, expected = row(to).pairs()[from].recv_count;
            if (sent != expected) return {from, to, sent, expected};
        }
    }
    return {};
}

/// The number in the header never falls: a rank that is ahead may refuse a later operator before this one does.
void ControlPlane::note_refusal() {
    my_flags().refused.value.store(seq_, std::memory_order_release);
    std::atomic<uint64_t>& last = header().refused;
    for (uint64_t known = last.load(); known < seq_ && !last.compare_exchange_weak(known, seq_);) {
    }
    doorbell_.ring();
}

/// True if a rank has refused this operator (REFUSED in row_protocol.pml).
bool ControlPlane::is_refused() const {
    for (int j = 0; j < size(); ++j)
        if (flags(j).refused.value.load(std::memory_order_acquire) == seq_) return true;
    return false;
}

/// REFUSED in row_protocol.pml: the caller may use the announced memory again once no peer continues with it. All ranks
/// have read the same rows, unless a broken peer has changed its own meanwhile; then ranks that have agreed may be
/// reading and writing here. Between hosts no rank accesses the memory of another.
void ControlPlane::refuse() {
    if (hosts) return;
    note_refusal();
    const auto has_gone_on = [&](int j) { return has_row(j, seq_ + 1); };
    wait_flags([](Flags& flags) -> Flag& { return flags.refused; }, seq_, [&](int j) { return !has_gone_on(j); });
    for (int j = 0; j < size(); ++j)
        if (flags(j).refused.value.load(std::memory_order_acquire) < seq_) throw_disagreement();
}

void ControlPlane::throw_disagreement() {
    poison(PoisonKind::lost, "the ranks have come to different verdicts about " + describe_op() +
                                 ": a rank has changed its row while they compared it");
    throw_poison();
}

/// Throws the first failure that concerns the calls of the other ranks; if none does, the first one, as UnmetFailure.
void ControlPlane::throw_failure() const {
    const auto failed = [&](int j) { return (row(j).flags & row_failed) != 0; };
    uint64_t called = 0;
    for (int j = 0; j < size(); ++j)
        if (!failed(j)) called |= summary_of(facts(j), {}, false).called;
    FailedRow first;
    for (int j = 0; j < size(); ++j)
        if (failed(j)) first.add(failure_of(facts(j), *reinterpret_cast<const ErrorText*>(payload(row(j))), called));
    verdict_of(first, describe_op(first.op)).raise();
}

/// Throws the first difference between rank 0 and another rank, or else between shapes; returns if there is none.
void ControlPlane::throw_difference() const {
    const RowFacts first = facts(0);
    const auto raise = [&](const std::string& difference) {
        if (!difference.empty())
            throw peer_mismatch("operator #" + std::to_string(seq_) + " of domain '" + domain() + "': " + difference);
    };
    Varied shapes;
    for (int j = 0; j < size(); ++j) {
        raise(row_difference(first, facts(j)));
        shapes.add(summary_of(facts(j), {}, true).shapes);
    }
    if (shapes.other >= 0) raise(shape_difference(facts(shapes.first), facts(shapes.other)));
}

/// The last rank of a group, and then of all, is the one that finds all others counted.
void ControlPlane::add_up() {
    constexpr int most = GroupSum::most_ranks;
    const int first = rank() / most * most, ranks = std::min(most, size() - first);
    const size_t turn = seq_ & 1;
    const auto is_last = [&](GroupSum& sum, size_t of) {
        return (sum.came[turn].fetch_add(1, std::memory_order_acq_rel) + 1) % of == 0;
    };
    GroupSum& group = layout_.sum_of_group(memory_->data(), static_cast<size_t>(first / most));
    if (!is_last(group, static_cast<size_t>(ranks))) return;
    Summary all;
    for (int j = first; j < first + ranks; ++j) all.add(summary_of(facts(j), row(j).balance, options_.check));
    group.sum[turn] = all;
    GroupSum& total = sum_of_all();
    if (!is_last(total, layout_.groups())) return;
    all = {};
    for (size_t k = 0; k < layout_.groups(); ++k) all.add(layout_.sum_of_group(memory_->data(), k).sum[turn]);
    total.sum[turn] = all;
    total.seq[turn].store(seq_, std::memory_order_release);
}

void ControlPlane::compare_rows() {
    if (hosts) return hosts->compare();
    if (adds_up() && !reads_all_) {
        const Summary all = sum_of_all().sum[seq_ & 1];
        if (all.ranks == static_cast<uint32_t>(size()) && all.agrees()) return;
    }
    const Row& first = row(0);
    Digest128 balance;
    bool any_failed = false, any_learns = false, all_learn = true, equal = true;
    for (int j = 0; j < size(); ++j) {
        const Row& r = row(j);
        any_failed |= (r.flags & row_failed) != 0;
        any_learns |= (r.flags & row_learns) != 0;
        all_learn &= (r.flags & row_learns) != 0;
        equal &= moves_alike(r, first);
        if (options_.check)
            equal &= r.op == first.op && r.dtype == first.dtype && r.reduce_op == first.reduce_op &&
                     r.root == first.root && r.count == first.count;
        balance += r.balance;
    }
    if (any_failed) throw_failure();
    if (!equal) throw_difference();
    // If some ranks learn their counts, the sum cannot be zero, so the others are compared pair by pair.
    if (all_learn || (!any_learns && !balance)) return;
    if (const PairDifference pair = find_difference(); pair.from >= 0)
        verdict_of(pair, first.op, first.count, describe_op()).raise();
}

}  // namespace alltoallv
