/// \file summary.h
/// \brief What ranks announce of one operator, put together: of one size for any number of ranks, in any order.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/core/collective.h"

namespace alltoallv {

struct Row;

/// The fields of a row that are equal on all ranks.
struct CommonTerms {
    OpKind op{};
    DType dtype{};
    ReduceOp reduce_op{};
    uint8_t flags = 0;
    int32_t root = 0;
    int64_t count = 0, terms = 0;
    uint32_t shape_digest = 0;
};

/// The rows of some ranks. Their details are needed only where the summary of all ranks does not agree.
struct Summary {
    uint32_t ranks = 0, failed = 0, learning = 0, with_payload = 0;  // how many
    uint32_t differ = 0;                                             // 1 if what must be equal is not
    CommonTerms common;                                              // of one of them
    uint64_t balance = 0;                                            // see pair_balance
    uint64_t called = 0;  // the operators of those that have not failed, a bit each

    /// `check`: all that the ranks announce is compared, not only how their data move.
    void add(const Row& row, bool check);
    void add(const Summary& more, bool check);
    /// True if the operator goes on. If not, and none has failed, the rows tell what is wrong: it goes on if the counts
    /// of those that know theirs are right.
    bool agrees() const { return failed == 0 && differ == 0 && (learning == ranks || (learning == 0 && balance == 0)); }
    bool needs_rows() const { return failed == 0 && !agrees(); }
};
static_assert(std::is_trivially_copyable_v<Summary>);

}  // namespace alltoallv
