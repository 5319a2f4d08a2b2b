// Agreement: every rank compares the same rows and so reaches the same verdict, with the same text (VERDICT in
// row_protocol.pml).
#include <algorithm>
#include <cstring>
#include <string>

#include "runtime/control/control.h"
#include "runtime/control/peer_words.h"
#include "runtime/core/mismatch.h"
#include "runtime/core/peer_names.h"
#include "runtime/core/quant_terms.h"
#include "runtime/core/terms.h"

namespace alltoallv {
namespace {

std::string rank_text(int rank) {
    return "rank " + std::to_string(rank);
}

/// True for operators whose rows describe one tensor, of the same shape on all ranks.
bool has_shape(OpKind op) {
    return is_reduction(op) || op == OpKind::scan;
}

template <class A>
ReductionTerms reduction_terms(const A& row) {
    return std::bit_cast<ReductionTerms>(row.terms);
}

/// Returns in how many leaves all ranks' inputs consist, 0 if they are added in the order of ranks.
template <class A>
uint64_t leaves_of(const A& row) {
    return row.op == OpKind::all_reduce ? reduction_terms(row).leaves : 0;
}

/// True if the data of two rows move alike: without that, two ranks' counters of a ring or of rounds would go apart,
/// and each later operator would get the data of an earlier one.
template <class A>
bool moves_alike(const A& a, const CommonTerms& b) {
    if (info(a.op).kind != info(b.op).kind || ((a.flags ^ b.flags) & row_moves_nothing) != 0) return false;
    if (a.dtype != b.dtype && (!is_known(a.dtype) || !is_known(b.dtype) || size_of(a.dtype) != size_of(b.dtype)))
        return false;
    if (!has_shape(a.op)) return true;
    return a.op == b.op && a.count == b.count && leaves_of(a) == leaves_of(b) &&
           (!is_quantized_reduction(a.op) || (a.terms == b.terms && a.dtype == b.dtype));
}

template <class A>
bool is_equal(const A& a, const CommonTerms& b) {
    return a.op == b.op && a.dtype == b.dtype && a.reduce_op == b.reduce_op && a.count == b.count &&
           a.terms == b.terms && a.root == b.root && a.shape_digest == b.shape_digest;
}

constexpr uint64_t bit_of(OpKind op) {
    return uint64_t{1} << std::min<uint64_t>(static_cast<uint64_t>(op), 63);
}

/// Returns the first difference between the shapes of ranks that have announced one; empty if there is none.
std::string shape_difference(const ControlPlane& control) {
    const auto shape_of = [&](int rank) {
        const Pair pair = RowWords(control.row(rank), control.rank()).pair;
        return rank_text(rank) + " has shape " + shape_text({pair.source, pair.target});
    };
    int first = -1;
    for (int j = 0; j < control.size(); ++j) {
        const uint32_t digest = control.row(j).shape_digest;
        if (digest == 0) continue;
        if (first < 0) first = j;
        if (digest != control.row(first).shape_digest) return shape_of(first) + ", " + shape_of(j);
    }
    return {};
}

/// Returns the difference between the rows of ranks 0 and `rank_b`, but for shapes; empty if there is none.
std::string row_difference(const ControlPlane& control, int rank_b) {
    constexpr int rank_a = 0;
    Row &a = control.row(rank_a), &b = control.row(rank_b);
    const auto both = [&](const std::string& of_a, const std::string& of_b) {
        return rank_text(rank_a) + " " + of_a + ", " + rank_text(rank_b) + " " + of_b;
    };
    // A call of several chunks begins with an exchange whose terms are their number (lockstep of the front ends).
    const auto call_of = [](const Row& row) {
        if (row.op != OpKind::exchange_counts || row.terms == 0) return "calls " + std::string(name_of(row.op));
        return "begins a call in " + std::to_string(row.terms) + " chunks";
    };
    if (a.op != b.op || (a.op == OpKind::exchange_counts && a.terms != b.terms)) return both(call_of(a), call_of(b));
    const bool one_is_empty = (a.count == 0) != (b.count == 0);  // its rows have no elements, and move nothing either
    if (((a.flags ^ b.flags) & row_moves_nothing) != 0 && !one_is_empty) {
        const auto memory_of = [](const Row& row) {
            return (row.flags & row_moves_nothing) != 0 ? "has its data on a device" : "has its data in host memory";
        };
        return both(memory_of(a), memory_of(b));
    }
    if (a.dtype != b.dtype) return both("has dtype " + peer_name(a.dtype), "has dtype " + peer_name(b.dtype));
    if (a.reduce_op != b.reduce_op)
        return both("reduces with " + std::string(name_of(a.reduce_op)),
                    "reduces with " + std::string(name_of(b.reduce_op)));
    const bool terms_differ = a.terms != b.terms;
    if (terms_differ && is_quantized_reduction(a.op)) {
        const QuantTerms of_a = *reinterpret_cast<const QuantTerms*>(control.payload(a));
        const QuantTerms of_b = *reinterpret_cast<const QuantTerms*>(control.payload(b));
        const std::string text = difference(of_a, rank_a, of_b, rank_b);
        if (!text.empty()) return text;
    }
    if (terms_differ && a.op == OpKind::quantized_all_to_all)
        return difference(std::bit_cast<RowTerms>(a.terms), rank_a, std::bit_cast<RowTerms>(b.terms), rank_b);
    if (terms_differ && a.op == OpKind::all_to_all_v) {
        const std::string of_a = describe_tokens(a.terms), of_b = describe_tokens(b.terms);
        if (of_a != of_b) return both("moves " + of_a, "moves " + of_b);
        return rank_text(rank_a) + " and " + rank_text(rank_b) + " move " + of_a +
               ", but differ in their weights, choices, experts or options";
    }
    if (terms_differ && a.op == OpKind::all_to_all_nd) {
        const auto of_a = std::bit_cast<DimensionTerms>(a.terms), of_b = std::bit_cast<DimensionTerms>(b.terms);
        if (of_a.text() != of_b.text()) return both(of_a.text(), of_b.text());
        return rank_text(rank_a) + " and " + rank_text(rank_b) +
               " differ in dimensions that are neither scattered nor "
               "gathered";
    }
    if (terms_differ && has_shape(a.op)) {
        const ReductionTerms of_a = reduction_terms(a), of_b = reduction_terms(b);
        const auto leaves = [](uint64_t number) { return number == 0 ? "None" : std::to_string(number); };
        if (of_a.leaves != of_b.leaves)
            return both("has leaves " + leaves(of_a.leaves), "has leaves " + leaves(of_b.leaves));
        const auto order = [](bool ordered) { return ordered ? "has order 'rank'" : "has order None"; };
        if (of_a.ordered != of_b.ordered) return both(order(of_a.ordered), order(of_b.ordered));
        const auto exclusive = [](bool first) { return first ? "has exclusive True" : "has exclusive False"; };
        if (of_a.exclusive != of_b.exclusive) return both(exclusive(of_a.exclusive), exclusive(of_b.exclusive));
    }
    if (a.root != b.root) return both("has root " + std::to_string(a.root), "has root " + std::to_string(b.root));
    if (a.count != b.count) {
        const char* what = has_shape(a.op) ? "has elements: " : "has elements per row: ";
        return both(what + std::to_string(a.count), what + std::to_string(b.count));
    }
    return {};
}

/// True if a call that announces its failures as `op` may have `called` among its operators.
bool may_consist_of(OpKind op, OpKind called) {
    switch (op) {
        case OpKind::global_scatter:
        case OpKind::global_gather:
            return called == op || called == OpKind::exchange_counts || called == OpKind::all_to_all_v;
        case OpKind::all_to_all_v:
        case OpKind::quantized_all_reduce:
            return called == op || called == OpKind::exchange_counts;
        case OpKind::all_gather:
            return called == op || called == OpKind::all_gather_into_tensor;
        case OpKind::reduce:
            return called == op || called == OpKind::all_reduce;
        default:
            return called == op;
    }
}

/// Fills in the shape and the counts: rank i gives counts_i[j] elements to the part of rank j, which has counts_j[j].
void announce_parts(OwnRow& own_row, int rank, std::span<const int64_t> counts, const ShapeWords& shape) {
    const int64_t own = counts[static_cast<size_t>(rank)];
    own_row.shape_digest = shape.digest;
    for (int j = 0; j < static_cast<int>(counts.size()); ++j) {
        const int64_t part = counts[static_cast<size_t>(j)];
        own_row.pairs()[j] = {part, shape.words[0], own, shape.words[1]};
        own_row.balance += pair_hash(rank, j, part) - pair_hash(j, rank, own);
    }
}

}  // namespace

void Summary::add(const Row& row, bool check) {
    if (ranks == 0)
        common = {row.op, row.dtype, row.reduce_op, row.flags, row.root, row.count, row.terms, row.shape_digest};
    else if (!moves_alike(row, common) || (check && !is_equal(row, common)))
        differ = 1;
    ++ranks;
    if ((row.flags & row_learns) != 0) ++learning;
    if ((row.flags & row_inline) != 0) ++with_payload;
    if ((row.flags & row_failed) != 0)
        ++failed;
    else
        called |= bit_of(row.op);
    balance += row.balance;
}

void Summary::add(const Summary& more, bool check) {
    if (ranks == 0) common = more.common;
    if (!moves_alike(more.common, common) || (check && !is_equal(more.common, common))) differ = 1;
    ranks += more.ranks;
    failed += more.failed;
    learning += more.learning;
    with_payload += more.with_payload;
    differ |= more.differ;
    called |= more.called;
    balance += more.balance;
}

void announce(OwnRow& own_row, int rank, const Reduction& r) {
    own_row.reduce_op = r.reduce_op;
    own_row.root = r.root;
    own_row.terms = word_of(ReductionTerms{static_cast<uint32_t>(r.leaves), r.ordered, r.exclusive, 0});
    own_row.count = total_count(r);
    if (!r.moves) own_row.flags |= row_moves_nothing;
    announce_parts(own_row, rank, r.counts, r.shape);
}

void announce(OwnRow& own_row, const ControlPlane& control, const QuantReduction& q) {
    const QuantTerms terms = terms_of(q);
    std::memcpy(control.payload(own_row), &terms, sizeof terms);
    own_row.terms = digest(terms);
    own_row.reduce_op = q.average ? ReduceOp::avg : ReduceOp::sum;
    own_row.count = total_count(q);
    if (!q.moves) own_row.flags |= row_moves_nothing;
    const std::vector<int64_t> none(static_cast<size_t>(control.size()));
    announce_parts(own_row, control.rank(), q.op == OpKind::quantized_reduce_scatter ? q.counts : none, q.shape);
}

/// Returns the first difference by receiver, then by sender. Rows that learn their counts agree with all. Between hosts
/// rank 0 looks for it, because only rank 0 has all counts.
CountMismatch ControlPlane::find_mismatch() {
    if (hosts && rank() != 0) {
        const auto compared = [&] { return header().compared.load(std::memory_order_acquire) >= seq_; };
        wait(compared, [&] { return compared() ? std::vector<int>{} : std::vector<int>{0}; }, false);
        return header().difference;
    }
    const auto found = [&] {
        for (int to = 0; to < size(); ++to) {
            if (row(to).flags & row_learns) continue;
            for (int from = 0; from < size(); ++from) {
                const int64_t sent = row(from).pairs()[to].send_count, expected = row(to).pairs()[from].recv_count;
                if (sent != expected) return CountMismatch{from, to, sent, expected};
            }
        }
        return CountMismatch{};
    }();
    if (hosts) {
        receive_mismatch(seq_, found);
        hosts->counts_compared(seq_, found);
    }
    return found;
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
    poison(PoisonKind::lost, "the ranks disagree on the outcome of " + describe_op() +
                                 ": a rank has changed its row while they compared it");
    throw_poison();
}

/// Throws the first failure that concerns the operators that other ranks have `called`; if none does, the first one, as
/// UnmetFailure. Of the failures on other hosts those that may be the first of their kind are here.
void ControlPlane::throw_failure(uint64_t called) {
    const auto failed = [&](int j) { return has_brought(j) && (row(j).flags & row_failed) != 0; };
    const auto concerns = [&](int by) {
        if ((row(by).flags & row_of_caller) == 0) return true;
        for (size_t op = 0; op < std::size(op_table); ++op)
            if ((called & bit_of(static_cast<OpKind>(op))) != 0 && may_consist_of(row(by).op, static_cast<OpKind>(op)))
                return true;
        return false;
    };
    const auto error_of = [&](int by) -> Error {
        const auto& error = *reinterpret_cast<const ErrorText*>(payload(row(by)));
        const std::string text =
            describe_op(row(by).op) + " failed on " + rank_text(by) + ": " + peer_text(error.text, sizeof error.text);
        const auto kind = static_cast<ErrorClass>(read_once(error.kind));
        if (kind > ErrorClass::resource) return peer_lost(4011, text);
        return {kind, static_cast<ErrorType>(error.code), text};
    };
    int first = -1;
    for (int j = 0; j < size(); ++j) {
        if (!failed(j)) continue;
        if (concerns(j)) throw error_of(j);
        if (first < 0) first = j;
    }
    if (first < 0) throw_disagreement();  // a broken peer has taken its failure back since
    throw UnmetFailure(error_of(first));
}

void ControlPlane::sum_up() {
    agreement_ = {};
    if (!hosts) {
        for (int j = 0; j < size(); ++j) agreement_.add(row(j), options_.check);
        return;
    }
    for (const int j : hosts->here) agreement_.add(row(j), options_.check);
    if (static_cast<int>(agreement_.ranks) < size()) agreement_.add(header().others.sum[seq_ & 1], options_.check);
}

void ControlPlane::compare_rows() {
    sum_up();
    if (agreement_.agrees()) return;
    if (agreement_.failed > 0) throw_failure(agreement_.called);
    // Between hosts the leaders, who see the same, send all rows now.
    if (hosts) wait_ranks([&](int j) { return has_row(j, seq_); });
    const Row& first = row(0);
    if (agreement_.differ != 0) {
        std::string difference;
        for (int j = 1; j < size() && difference.empty(); ++j) difference = row_difference(*this, j);
        if (difference.empty() && has_shape(first.op)) difference = shape_difference(*this);
        if (!difference.empty())
            throw peer_mismatch(3009,
                                "operator #" + std::to_string(seq_) + " of domain '" + domain() + "': " + difference);
    }
    // If some ranks learn their counts, the sum is not 0, so the others are compared pair by pair.
    const bool all_learn = agreement_.learning == agreement_.ranks;
    if (all_learn || (agreement_.learning == 0 && agreement_.balance == 0)) return;
    const CountMismatch pair = find_mismatch();
    if (pair.from < 0) return;
    const int64_t row = is_reduction(first.op) ? 1 : first.count, unit = std::max<int64_t>(row, 1);
    throw counts_disagree(describe_op(), rank_text(pair.from), pair.sent / unit, rank_text(pair.to),
                          pair.expected / unit, row == 1 ? "elements" : "rows");
}

}  // namespace alltoallv
