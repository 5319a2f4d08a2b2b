// Reduces element by element: loops over two arrays, cloned per instruction set, and code that chains them.
#include "op_kernel/cpu/reduce.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>

#include "op_kernel/cpu/elements.h"
#include "op_kernel/cpu/half_blocks.h"
#include "runtime/base/error.h"

namespace alltoallv::kernel {
namespace {

// The operators. Integers are computed unsigned and at least 32 bits wide, so that wrapping is defined.

template <class T, bool = std::is_integral_v<T>>
struct Wide {
    using type = T;
};
template <class T>
struct Wide<T, true> {
    using type = std::make_unsigned_t<std::common_type_t<T, int>>;
};

template <class Op>
struct Wrapping {
    template <class T>
    ALLTOALLV_INLINE T operator()(T a, T b) const {
        using U = typename Wide<T>::type;
        return static_cast<T>(Op{}(static_cast<U>(a), static_cast<U>(b)));
    }
};
using Sum = Wrapping<std::plus<>>;
using Prod = Wrapping<std::multiplies<>>;

/// Ties (+0 and -0) keep the earlier operand; a NaN on either side wins.
template <class Beats>
struct Extreme {
    template <class T>
    ALLTOALLV_INLINE T operator()(T a, T b) const {
        const T best = Beats{}(b, a) ? b : a;
        return b != b ? b : best;
    }
};
using Min = Extreme<std::less<>>;
using Max = Extreme<std::greater<>>;

struct Or {
    ALLTOALLV_INLINE uint8_t operator()(uint8_t a, uint8_t b) const { return static_cast<uint8_t>((a | b) != 0); }
};

struct And {
    ALLTOALLV_INLINE uint8_t operator()(uint8_t a, uint8_t b) const {
        return static_cast<uint8_t>((a != 0) & (b != 0));
    }
};

struct Xor {
    ALLTOALLV_INLINE uint8_t operator()(uint8_t a, uint8_t b) const {
        return static_cast<uint8_t>((a != 0) != (b != 0));
    }
};

// The loops. `out` may be one of the inputs.

template <class T, class Op>
ALLTOALLV_INLINE void each(Bytes* out, const Bytes* a, const Bytes* b, size_t count, Op op) {
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) store<T>(out, k, canonical_nan(op(load<T>(a, k), load<T>(b, k))));
}

template <class T>
ALLTOALLV_INLINE void combine_numbers(ReduceOp op, Bytes* out, const Bytes* a, const Bytes* b, size_t count) {
    switch (op) {
        case ReduceOp::sum:
        case ReduceOp::avg:
            return each<T>(out, a, b, count, Sum{});
        case ReduceOp::min:
            return each<T>(out, a, b, count, Min{});
        case ReduceOp::max:
            return each<T>(out, a, b, count, Max{});
        case ReduceOp::prod:
            return each<T>(out, a, b, count, Prod{});
        default:
            if constexpr (std::is_integral_v<T>) {
                if (op == ReduceOp::band) return each<T>(out, a, b, count, std::bit_and<T>{});
                if (op == ReduceOp::bor) return each<T>(out, a, b, count, std::bit_or<T>{});
                each<T>(out, a, b, count, std::bit_xor<T>{});
            }
    }
}

ALLTOALLV_INLINE void combine_bools(ReduceOp op, Bytes* out, const Bytes* a, const Bytes* b, size_t count) {
    if (op == ReduceOp::sum || op == ReduceOp::max || op == ReduceOp::bor) return each<uint8_t>(out, a, b, count, Or{});
    if (op == ReduceOp::bxor) return each<uint8_t>(out, a, b, count, Xor{});
    each<uint8_t>(out, a, b, count, And{});
}

/// The loops for one element type; bool means bytes of truth values.
template <class T>
ALLTOALLV_INLINE void combine_all(ReduceOp op, Bytes* out, const Bytes* a, const Bytes* b, size_t count) {
    if constexpr (std::is_same_v<T, bool>)
        combine_bools(op, out, a, b, count);
    else
        combine_numbers<T>(op, out, a, b, count);
}

/// The loops for averages, which exist for floats only.
template <class T>
ALLTOALLV_INLINE void divide_all(Bytes* out, const Bytes* in, size_t count, size_t divisor) {
    if constexpr (std::is_floating_point_v<T>) {
        const T by = static_cast<T>(divisor);
        ALLTOALLV_INDEPENDENT
        for (size_t k = 0; k < count; ++k) store<T>(out, k, load<T>(in, k) / by);
    }
}

/// The functions that reduce one dtype on one instruction set.
struct Kernels {
    void (*combine)(ReduceOp op, Bytes* out, const Bytes* a, const Bytes* b, size_t count);
    void (*divide)(Bytes* out, const Bytes* in, size_t count, size_t divisor);
};

Kernels kernels_of(DType dtype, Isa isa) {
    const auto of = [isa]<class T>(T) { return Kernels{clones<combine_all<T>>[isa], clones<divide_all<T>>[isa]}; };
    switch (dtype) {
        case DType::bool_:
            return of(bool());
        case DType::int8:
            return of(int8_t());
        case DType::uint8:
            return of(uint8_t());
        case DType::int16:
            return of(int16_t());
        case DType::uint16:
            return of(uint16_t());
        case DType::int32:
            return of(int32_t());
        case DType::uint32:
            return of(uint32_t());
        case DType::int64:
            return of(int64_t());
        case DType::uint64:
            return of(uint64_t());
        case DType::float64:
            return of(double());
        default:  // halves are computed in float32
            return of(float());
    }
}

/// Blocks keep the accumulators, and a widened input, in the first-level cache.
constexpr size_t block_bytes = 8192, node_bytes = 2048;
constexpr size_t tree_depth = std::bit_width(most_leaves);  // nodes that are kept while others are computed

/// Reduces `count` elements, at most a block of accumulators, that begin `offset` bytes into every array. Elements that
/// `half` converts are widened, computed in float32 and rounded once. `out` is written only after the last input is
/// read, because it may be any of them.
void reduce_block(const Kernels& run, const HalfBlocks& half, ReduceOp op, Bytes* out, const void* const* inputs,
                  size_t n_inputs, size_t offset, size_t count) {
    alignas(64) Bytes acc[block_bytes];
    alignas(64) Bytes widened[block_bytes];
    const bool halves = half.widen != nullptr;
    const auto input = [&](size_t i, Bytes* buffer) {
        const Bytes* from = static_cast<const Bytes*>(inputs[i]) + offset;
        if (!halves) return from;
        half.widen(buffer, from, count);
        return static_cast<const Bytes*>(buffer);
    };
    Bytes* const last = halves ? acc : out + offset;
    const Bytes* left = input(0, acc);
    for (size_t i = 1; i < n_inputs; ++i) {
        Bytes* to = i + 1 == n_inputs && op != ReduceOp::avg ? last : acc;
        run.combine(op, to, left, input(i, widened), count);
        left = acc;
    }
    if (op == ReduceOp::avg) run.divide(last, acc, count, n_inputs);
    if (halves) half.narrow(out + offset, acc, count);
}

/// The same as `reduce_block` by the tree of `Order::tree`, in blocks of `node_bytes`.
class Tree {
  public:
    Tree(const Kernels& run, const HalfBlocks& half, ReduceOp op, const void* const* inputs, size_t n_inputs)
        : run_(run), half_(half), op_(op), inputs_(inputs), n_inputs_(n_inputs) {}

    void reduce(Bytes* out, size_t offset, size_t count) {
        offset_ = offset;
        count_ = count;
        const bool halves = half_.widen != nullptr, averages = op_ == ReduceOp::avg;
        Bytes* const sum = node(0, n_inputs_, 0, halves || averages ? nodes_[0] : out + offset);
        if (averages) run_.divide(halves ? sum : out + offset, sum, count, n_inputs_);
        if (halves) half_.narrow(out + offset, sum, count);
    }

  private:
    /// Reduces `n` inputs, at least 2, from number `first` on into `to`; leaves the nodes above `depth` alone.
    Bytes* node(size_t first, size_t n, size_t depth, Bytes* to) {
        const size_t left = std::bit_floor(n - 1);
        const Bytes* const a = subtree(first, left, depth);
        run_.combine(op_, to, a, subtree(first + left, n - left, depth + 1), count_);
        return to;
    }
    const Bytes* subtree(size_t first, size_t n, size_t depth) {
        if (n > 1) return node(first, n, depth, nodes_[depth]);
        const Bytes* const from = static_cast<const Bytes*>(inputs_[first]) + offset_;
        if (half_.widen == nullptr) return from;
        half_.widen(nodes_[depth], from, count_);
        return nodes_[depth];
    }

    const Kernels& run_;
    const HalfBlocks& half_;
    const ReduceOp op_;
    const void* const* const inputs_;
    const size_t n_inputs_;
    size_t offset_ = 0, count_ = 0;
    alignas(64) Bytes nodes_[tree_depth + 1][node_bytes];
};

}  // namespace

bool reduces(DType dtype, ReduceOp op) {
    return is_defined(op, info(dtype).arithmetic);
}

void reduce(DType dtype, ReduceOp op, void* out, const void* const* inputs, size_t n_inputs, size_t count,
            Order order) {
    reduce_on(best_isa(), dtype, op, out, inputs, n_inputs, count, order);
}

void reduce_on(Isa isa, DType dtype, ReduceOp op, void* out, const void* const* inputs, size_t n_inputs, size_t count,
               Order order) {
    if (!reduces(dtype, op)) {
        throw invalid_param(1044, "op '", name_of(op), "' is not defined for dtype ", name_of(dtype), ", expected ",
                            dtypes_listed(op));
    }
    if (n_inputs == 0) throw invalid_param(1486, "n_inputs is 0, expected at least one source to reduce");
    if (order == Order::tree && n_inputs > most_leaves)
        throw invalid_param(1487, "n_inputs is ", n_inputs, ", expected at most ", most_leaves, " in a tree");
    if (count == 0) return;
    if (info(dtype).arithmetic == Arithmetic::complex) {  // part by part
        dtype = dtype == DType::complex64 ? DType::float32 : DType::float64;
        count *= 2;
    }
    const Kernels run = kernels_of(dtype, isa);
    auto* to = static_cast<Bytes*>(out);
    const size_t size = size_of(dtype);
    if (n_inputs == 1) {
        const auto* from = static_cast<const Bytes*>(inputs[0]);
        if (dtype == DType::bool_)
            run.combine(ReduceOp::max, to, from, from, count);  // x or x: normalizes to 0 or 1
        else if (to != from)
            std::memcpy(to, from, count * size);
        return;
    }
    const bool halves = info(dtype).arithmetic == Arithmetic::floating && size < sizeof(float);
    const HalfBlocks half = halves ? half_blocks(dtype, isa) : HalfBlocks{nullptr, nullptr};
    if (order == Order::tree && n_inputs > 2) {
        Tree tree(run, half, op, inputs, n_inputs);
        const size_t block = node_bytes / (halves ? sizeof(float) : size);
        for (size_t first = 0; first < count; first += block)
            tree.reduce(to, first * size, std::min(block, count - first));
        return;
    }
    // Two inputs need no accumulator, so all of it is one block.
    const bool at_once = n_inputs == 2 && op != ReduceOp::avg && !halves;
    const size_t block = at_once ? count : block_bytes / (halves ? sizeof(float) : size);
    for (size_t first = 0; first < count; first += block)
        reduce_block(run, half, op, to, inputs, n_inputs, first * size, std::min(block, count - first));
}

}  // namespace alltoallv::kernel
