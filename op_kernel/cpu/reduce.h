// Element-wise reduction of several sources in a fixed order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "op_kernel/cpu/clones.h"
#include "runtime/base/dtype.h"
#include "runtime/base/reduce_op.h"

namespace alltoallv::kernel {

/// True if `reduce` is defined for `dtype`. For bool, sum, max and bor are logical or, min, prod and band logical and.
bool reduces(DType dtype, ReduceOp op);

/// In which order the inputs are combined: one after the other; or in a tree over their number n alone: neighbours in
/// pairs, the results in pairs, and so on, and what is left over at the end goes up as it is. So a node of more than
/// one has the largest power of two below n on its left.
enum class Order : uint8_t { sequence, tree };

constexpr size_t most_leaves = 4096;  ///< inputs of a tree

/// out[k] = in[0][k] (op) in[1][k] (op) ... in this order of `inputs`, k < count, or by the tree. float16 and bfloat16
/// accumulate in float32 and round once, half to even; integers wrap; min and max propagate NaN and keep the earlier
/// operand of +0 and -0; avg divides the sum by n_inputs. A NaN result is always the positive quiet NaN without
/// payload, so the bits are the same on every machine; a single input is copied as it is (bool becomes 0 or 1). `out`
/// may be one of the inputs but must not overlap them otherwise. Any alignment. Throws Error (invalid_param) if
/// reduces() is false, n_inputs is 0, or a tree has more than `most_leaves`.
void reduce(DType dtype, ReduceOp op, void* out, const void* const* inputs, size_t n_inputs, size_t count,
            Order order = Order::sequence);

/// Runs reduce() on one instruction set, which this processor must have (at most best_isa()): for tests.
void reduce_on(Isa isa, DType dtype, ReduceOp op, void* out, const void* const* inputs, size_t n_inputs, size_t count,
               Order order = Order::sequence);

}  // namespace alltoallv::kernel
