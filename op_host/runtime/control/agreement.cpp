#include "runtime/control/agreement.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "runtime/control/peer_words.h"
#include "runtime/core/peer_names.h"
#include "runtime/core/shape_words.h"
#include "runtime/core/token_terms.h"

namespace alltoallv {
namespace {

std::string rank_text(int rank) {
    return "rank " + std::to_string(rank);
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

constexpr uint64_t bit_of(OpKind op) {
    return uint64_t{1} << std::min<uint64_t>(static_cast<uint64_t>(op), 63);
}

/// Returns the lower of two ranks, of which any may be absent.
int32_t lower(int32_t a, int32_t b) {
    return a < 0 || (b >= 0 && b < a) ? b : a;
}

/// The part of `root` that is compared: the other half of a reduction's is the digest of its shape, and a quantized
/// one's is in its terms.
int64_t compared_root(const RowFacts& facts) {
    if (is_quantized_reduction(facts.op)) return 0;
    const bool whole = facts.op == OpKind::exchange_counts || facts.op == OpKind::quantized_all_to_all ||
                       facts.op == OpKind::all_to_all_v;
    return whole ? facts.root : static_cast<int32_t>(facts.root);
}

/// All that `row_difference` looks at.
Digest128 digest_of(const RowFacts& facts) {
    const auto of = [](auto value) { return static_cast<uint64_t>(value); };
    const QuantTerms& q = facts.terms;
    const uint64_t words[] = {
        of(facts.op) << 40 | of(facts.dtype) << 8 | of(facts.reduce_op),
        of(facts.flags & row_moves_nothing),
        of(facts.count),
        of(compared_root(facts)),
        of(q.out_dtype),
        of(q.mode) << 32 | of(q.overflow) << 24 | of(q.format) << 16 | of(q.requantizes) << 8 | of(q.feeds_back),
        of(q.group_size),
        q.scales,
        of(std::bit_cast<uint32_t>(q.scale)) << 32 | std::bit_cast<uint32_t>(q.scale_2),
        std::bit_cast<uint32_t>(q.offset),
        q.scale_digest,
        q.scale_2_digest};
    return digest_of_words(words, sizeof words);
}

/// Without what is equal here, two ranks' counters of a ring or of rounds would go apart, and each later operator would
/// get the data of an earlier one.
Digest128 digest_of_moves(const RowFacts& facts) {
    const bool shaped = has_shape(facts.op), quantized = is_quantized_reduction(facts.op);
    RowFacts all = shaped ? facts : RowFacts{};
    if (!shaped) all.count = static_cast<int64_t>(info(facts.op).kind);
    all.reduce_op = ReduceOp::sum;
    if (!quantized) {
        all.root = 0;
        all.dtype = DType::uint8;
    }
    const auto width = is_known(facts.dtype) ? size_of(facts.dtype) : 256 + static_cast<size_t>(facts.dtype);
    all.flags = facts.flags;
    Digest128 digest = digest_of(all);
    const uint64_t words[] = {shaped ? 1u : 0u, width, digest.words[0], digest.words[1]};
    return digest_of_words(words, sizeof words);
}

}  // namespace

RowFacts facts_of(const Row& row, const char* payload, int rank) {
    RowFacts facts;
    facts.rank = rank;
    facts.op = read_once(row.op);
    facts.dtype = read_once(row.dtype);
    facts.reduce_op = read_once(row.reduce_op);
    facts.flags = read_once(row.flags);
    facts.count = read_once(row.count);
    facts.root = read_once(row.root);
    if (has_shape(facts.op)) facts.shape = {read_once(row.pairs()->source), read_once(row.pairs()->target)};
    if (is_quantized_reduction(facts.op)) std::memcpy(&facts.terms, payload, sizeof facts.terms);
    return facts;
}

uint32_t shape_digest(const RowFacts& facts) {
    if (is_quantized_reduction(facts.op)) return facts.terms.shape_digest;
    return static_cast<uint32_t>(static_cast<uint64_t>(facts.root) >> 32);
}

std::string row_difference(const RowFacts& a, const RowFacts& b) {
    const int rank_a = a.rank, rank_b = b.rank;
    const auto both = [&](const std::string& of_a, const std::string& of_b) {
        return rank_text(rank_a) + " " + of_a + ", " + rank_text(rank_b) + " " + of_b;
    };
    // A call of several chunks begins with an exchange whose root is their number (in_step of the front ends).
    const auto call_of = [](const RowFacts& row) {
        if (row.op != OpKind::exchange_counts || row.root == 0) return "calls " + std::string(name_of(row.op));
        return "begins a call in " + std::to_string(row.root) + " chunks";
    };
    if (a.op != b.op || (a.op == OpKind::exchange_counts && a.root != b.root)) return both(call_of(a), call_of(b));
    if (((a.flags ^ b.flags) & row_moves_nothing) != 0) {
        const auto memory_of = [](const RowFacts& row) {
            return (row.flags & row_moves_nothing) != 0 ? "has its data on a device" : "has its data in host memory";
        };
        return both(memory_of(a), memory_of(b));
    }
    if (a.dtype != b.dtype) return both("has dtype " + peer_name(a.dtype), "has dtype " + peer_name(b.dtype));
    if (a.reduce_op != b.reduce_op)
        return both("reduces with " + std::string(name_of(a.reduce_op)),
                    "reduces with " + std::string(name_of(b.reduce_op)));
    if (a.root != b.root && is_quantized_reduction(a.op)) {
        const std::string text = difference(a.terms, rank_a, b.terms, rank_b);
        if (!text.empty()) return text;
    }
    if (a.root != b.root && a.op == OpKind::quantized_all_to_all)
        return terms_difference(a.root, rank_a, b.root, rank_b);
    if (a.root != b.root && a.op == OpKind::all_to_all_v) {
        const std::string of_a = describe_token_terms(a.root), of_b = describe_token_terms(b.root);
        if (of_a != of_b) return both("moves " + of_a, "moves " + of_b);
        return rank_text(rank_a) + " and " + rank_text(rank_b) + " move " + of_a +
               ", but differ in their weights, choices, experts or options";
    }
    const auto root_of = [](const RowFacts& row) { return static_cast<int32_t>(row.root); };
    if (a.op == OpKind::scan && root_of(a) != root_of(b))
        return both(root_of(a) == 0 ? "has exclusive False" : "has exclusive True",
                    root_of(b) == 0 ? "has exclusive False" : "has exclusive True");
    if (root_of(a) != root_of(b) && !is_quantized_reduction(a.op))
        return both("has root " + std::to_string(root_of(a)), "has root " + std::to_string(root_of(b)));
    if (a.count != b.count) {
        const char* what = has_shape(a.op) ? "has elements: " : "has elements per row: ";
        return both(what + std::to_string(a.count), what + std::to_string(b.count));
    }
    return {};
}

std::string shape_difference(const RowFacts& a, const RowFacts& b) {
    const auto text = [](const RowFacts& of) { return rank_text(of.rank) + " has shape " + shape_text(of.shape); };
    return text(a) + ", " + text(b);
}

void Varied::add(const Varied& more) {
    if (more.first < 0) return;
    if (first < 0) {
        *this = more;
        return;
    }
    const Varied& low = more.first < first ? more : *this;
    const Varied& high = more.first < first ? *this : more;
    const int32_t differs = lower(low.other, value == more.value ? high.other : high.first);
    *this = Varied{low.first, differs, low.value};
}

void Summary::add(const Summary& more) {
    ranks += more.ranks;
    failed += more.failed;
    learning += more.learning;
    with_payload += more.with_payload;
    called |= more.called;
    facts.add(more.facts);
    shapes.add(more.shapes);
    balance += more.balance;
}

Summary summary_of(const RowFacts& facts, const Digest128& balance, bool check) {
    Summary one;
    one.ranks = 1;
    if ((facts.flags & row_failed) != 0) {
        one.failed = 1;
        return one;
    }
    one.learning = (facts.flags & row_learns) != 0 ? 1 : 0;
    one.with_payload = (facts.flags & row_inline) != 0 ? 1 : 0;
    one.called = bit_of(facts.op);
    one.facts = {facts.rank, -1, check ? digest_of(facts) : digest_of_moves(facts)};
    if (const uint32_t digest = shape_digest(facts); check && has_shape(facts.op) && digest != 0) {
        const uint64_t words[] = {digest, static_cast<uint64_t>(facts.shape[0]), static_cast<uint64_t>(facts.shape[1])};
        one.shapes = {facts.rank, -1, digest_of_words(words, sizeof words)};
    }
    one.balance = balance;
    return one;
}

void FailedRow::add(const FailedRow& more) {
    if (more.rank < 0) return;
    if (rank < 0 || more.concerns > concerns || (more.concerns == concerns && more.rank < rank)) *this = more;
}

FailedRow failure_of(const RowFacts& facts, const ErrorText& text, uint64_t called) {
    FailedRow failure{facts.rank, (facts.flags & row_of_caller) == 0 ? 1u : 0u, facts.op, text};
    for (size_t op = 0; op < std::size(op_table); ++op) {
        const auto other = static_cast<OpKind>(op);
        if ((called & bit_of(other)) != 0 && may_consist_of(facts.op, other)) failure.concerns = 1;
    }
    return failure;
}

void Verdict::raise() const {
    if (unmet) throw UnmetFailure(error);
    throw error;
}

Verdict verdict_of(const FailedRow& failure, const std::string& operator_text) {
    const std::string text = operator_text + " failed on " + rank_text(failure.rank) + ": " +
                             peer_text(failure.error.text, sizeof failure.error.text);
    const auto kind = static_cast<ErrorClass>(failure.error.kind);
    const Error error =
        kind > ErrorClass::resource ? peer_lost(text) : Error(kind, static_cast<ErrorType>(failure.error.code), text);
    return {error, failure.concerns == 0};
}

Verdict verdict_of(const PairDifference& pair, OpKind op, int64_t row, const std::string& operator_text) {
    const int64_t unit = is_reduction(op) ? 1 : std::max<int64_t>(row, 1);
    return {peer_mismatch(operator_text + ": " + rank_text(pair.from) + " sends " + std::to_string(pair.sent / unit) +
                          (unit > 1 ? " rows" : " elements") + " to " + rank_text(pair.to) + ", which expects " +
                          std::to_string(pair.expected / unit))};
}

}  // namespace alltoallv
