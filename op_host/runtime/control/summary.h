/// \file summary.h
/// \brief What ranks say of one operator, added up: of a constant size for any number of ranks, in any order.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/core/digest.h"

namespace alltoallv {

/// The lowest of some ranks that have a value, and the lowest one with another value.
struct Varied {
    int32_t first = -1, other = -1;
    Digest128 value;  // of `first`

    void add(const Varied& more);
};
static_assert(std::is_trivially_copyable_v<Varied>);

/// Some ranks' rows of one operator.
struct Summary {
    uint32_t ranks = 0, failed = 0, learning = 0, with_payload = 0;  // how many
    uint64_t called = 0;   // the operators of those that have not failed, a bit each
    Varied facts, shapes;  // of those that have not failed
    Digest128 balance;     // of all pairs

    void add(const Summary& more);
    /// True if the operator goes on. If not, the details tell what is wrong, and it goes on if they agree.
    bool agrees() const {
        return failed == 0 && facts.other < 0 && shapes.other < 0 && (learning == ranks || (learning == 0 && !balance));
    }
};
static_assert(std::is_trivially_copyable_v<Summary>);

}  // namespace alltoallv
