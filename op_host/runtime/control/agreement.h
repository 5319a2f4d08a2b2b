/// \file agreement.h
/// \brief What ranks compare: a summary of their rows, which can be combined in any order, and the errors that tell
/// what differs.
///
/// A summary has a constant size for any number of ranks. If it shows that something is wrong, the rows that the error
/// is about are looked at, and only those.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "runtime/base/error.h"
#include "runtime/control/layout.h"
#include "runtime/control/summary.h"
#include "runtime/core/quant_terms.h"

namespace alltoallv {

/// What a rank says about its call besides counts.
struct RowFacts {
    int32_t rank = -1;  // -1: nothing is known
    OpKind op{};
    DType dtype{};
    ReduceOp reduce_op{};
    uint8_t flags = 0;
    int64_t count = 0, root = 0;
    std::array<int64_t, 2> shape{};  // of a reduction, as `shape_text` takes it
    QuantTerms terms{};              // of a quantized reduction
};
static_assert(std::is_trivially_copyable_v<RowFacts>);

/// Reads a row once. `payload` is its own.
RowFacts facts_of(const Row& row, const char* payload, int rank);

/// The digest of a tensor's shape; 0 if the rank has none, which no other rank minds.
uint32_t shape_digest(const RowFacts& facts);

/// True for operators whose rows describe one tensor, of the same shape on all ranks.
constexpr bool has_shape(OpKind op) {
    return is_reduction(op) || op == OpKind::scan;
}

/// Returns the difference as "rank 0 calls barrier, rank 1 calls all_gather"; empty if there is none.
std::string row_difference(const RowFacts& a, const RowFacts& b);
std::string shape_difference(const RowFacts& a, const RowFacts& b);

/// Without `check` only that is compared without which data would go where they do not belong.
Summary summary_of(const RowFacts& facts, const Digest128& balance, bool check);

/// The failure of a rank that could not make its call.
struct FailedRow {
    int32_t rank = -1;
    uint32_t concerns = 0;  // 1 if other ranks' calls cannot be made without it
    OpKind op{};
    ErrorText error{};

    /// Keeps the first failure that concerns others; if none does, the first one.
    void add(const FailedRow& more);
};
static_assert(std::is_trivially_copyable_v<FailedRow>);

/// `called` is of the summary of all ranks.
FailedRow failure_of(const RowFacts& facts, const ErrorText& text, uint64_t called);

/// What all ranks raise.
struct Verdict {
    Error error;
    bool unmet = false;  // see UnmetFailure

    [[noreturn]] void raise() const;
};

/// `operator_text` is "operator #3 all_gather of domain 'default'", of the failed call.
Verdict verdict_of(const FailedRow& failure, const std::string& operator_text);

/// Two ranks that disagree about a count; from < 0 if none do.
struct PairDifference {
    int32_t from = -1, to = -1;
    int64_t sent = 0, expected = 0;
};

Verdict verdict_of(const PairDifference& pair, OpKind op, int64_t row, const std::string& operator_text);

}  // namespace alltoallv
