// Element-wise reduction: loops over two arrays, cloned per instruction set, and the driver that chains them.
#include "op_kernel/cpu/reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "op_kernel/cpu/clones.h"
#include "op_kernel/cpu/half_blocks.h"

namespace alltoallv::kernel {
namespace {

using Bytes = unsigned char;

// memcpy makes any alignment and any declared type of the caller's memory legal, and still vectorizes.

template <class T>
ALLTOALLV_INLINE T load(const Bytes* from, size_t k) {
    T value;
    std::memcpy(&value, from + k * sizeof(T), sizeof(T));
    return value;
}

template <class T>
ALLTOALLV_INLINE void store(Bytes* to, size_t k, T value) {
    std::memcpy(to + k * sizeof(T), &value, sizeof(T));
}

/// Which of two NaNs an addition returns, and the sign of a new one, depend on the processor and on operand order.
template <class T>
ALLTOALLV_INLINE T one_nan(T value) {
    if constexpr (std::is_floating_point_v<T>) return value != value ? static_cast<T>(__builtin_nan("")) : value;
    return value;
}

// The operators. Integers are computed unsigned and at least 32 bits wide, so that wrapping is defined.

template <class T, bool = std::is_integral_v<T>>
struct Wide {
    using type = T;
};
template <class T>
struct Wide<T, true> {
    using type = std::make_unsigned_t<std::common_type_t<T, int>>;
};

struct Sum {
    template <class T>
    ALLTOALLV_INLINE T operator()(T a, T b) const {
        using U = typename Wide<T>::type;
        return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    }
};

struct Prod {
    template <class T>
    ALLTOALLV_INLINE T operator()(T a, T b) const {
        using U = typename Wide<T>::type;
        return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
    }
};

// Ties (+0 and -0) keep the earlier operand; a NaN on either side wins.
struct Min {
    template <class T>
    ALLTOALLV_INLINE T operator()(T a, T b) const {
        const T least = b < a ? b : a;
        return b != b ? b : least;
    }
};

struct Max {
    template <class T>
    ALLTOALLV_INLINE T operator()(T a, T b) const {
        const T greatest = b > a ? b : a;
        return b != b ? b : greatest;
    }
};

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

// The loops. `out` may be any of the inputs.

template <class T, class Op>
ALLTOALLV_INLINE void each(Bytes* out, const Bytes* a, const Bytes* b, size_t count, Op op) {
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) store<T>(out, k, one_nan(op(load<T>(a, k), load<T>(b, k))));
}

template <class T>
ALLTOALLV_INLINE void combine(Reduce op, Bytes* out, const Bytes* a, const Bytes* b, size_t count) {
    switch (op) {
        case Reduce::sum:
        case Reduce::avg:
            return each<T>(out, a, b, count, Sum{});
        case Reduce::min:
            return each<T>(out, a, b, count, Min{});
        case Reduce::max:
            return each<T>(out, a, b, count, Max{});
        case Reduce::prod:
            return each<T>(out, a, b, count, Prod{});
        default:
            if constexpr (std::is_integral_v<T>) {
                if (op == Reduce::band) return each<T>(out, a, b, count, std::bit_and<T>{});
                if (op == Reduce::bor) return each<T>(out, a, b, count, std::bit_or<T>{});
                each<T>(out, a, b, count, std::bit_xor<T>{});
            }
    }
}

ALLTOALLV_INLINE void combine_bools(Reduce op, Bytes* out, const Bytes* a, const Bytes* b, size_t count) {
    if (op == Reduce::sum || op == Reduce::max || op == Reduce::bor) return each<uint8_t>(out, a, b, count, Or{});
    if (op == Reduce::bxor) return each<uint8_t>(out, a, b, count, Xor{});
    each<uint8_t>(out, a, b, count, And{});
}

template <class T>
ALLTOALLV_INLINE void divide(Bytes* out, const Bytes* in, size_t count, size_t divisor) {
    const T by = static_cast<T>(divisor);
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) store<T>(out, k, load<T>(in, k) / by);
}

#define PARAMS (Reduce op, Bytes * out, const Bytes* a, const Bytes* b, size_t count)
#define ARGS (op, out, a, b, count)
ALLTOALLV_CLONES(combine_bool, combine_bools, PARAMS, ARGS)
ALLTOALLV_CLONES(combine_int8, combine<int8_t>, PARAMS, ARGS)
ALLTOALLV_CLONES(combine_uint8, combine<uint8_t>, PARAMS, ARGS)
ALLTOALLV_CLONES(combine_int16, combine<int16_t>, PARAMS, ARGS)
ALLTOALLV_CLONES(combine_uint16, combine<uint16_t>, PARAMS, ARGS)
ALLTOALLV_CLONES(combine_int32, combine<int32_t>, PARAMS, ARGS)
ALLTOALLV_CLONES(combine_uint32, combine<uint32_t>, PARAMS, ARGS)
ALLTOALLV_CLONES(combine_int64, combine<int64_t>, PARAMS, ARGS)
ALLTOALLV_CLONES(combine_uint64, combine<uint64_t>, PARAMS, ARGS)
ALLTOALLV_CLONES(combine_float32, combine<float>, PARAMS, ARGS)
ALLTOALLV_CLONES(combine_float64, combine<double>, PARAMS, ARGS)
#undef ARGS
#undef PARAMS
ALLTOALLV_CLONES(divide_float32, divide<float>, (Bytes * out, const Bytes* in, size_t count, size_t divisor),
                 (out, in, count, divisor))
ALLTOALLV_CLONES(divide_float64, divide<double>, (Bytes * out, const Bytes* in, size_t count, size_t divisor),
                 (out, in, count, divisor))

/// What reduces one dtype on one instruction set.
struct Kernels {
    decltype(&combine_bool_base) combine;
    decltype(&divide_float32_base) divide;
};

Kernels kernels_of(DType dtype, Isa isa) {
    const auto i = static_cast<size_t>(isa);
    switch (dtype) {
        case DType::bool_:
            return {combine_bool[i], nullptr};
        case DType::int8:
            return {combine_int8[i], nullptr};
        case DType::uint8:
            return {combine_uint8[i], nullptr};
        case DType::int16:
            return {combine_int16[i], nullptr};
        case DType::uint16:
            return {combine_uint16[i], nullptr};
        case DType::int32:
            return {combine_int32[i], nullptr};
        case DType::uint32:
            return {combine_uint32[i], nullptr};
        case DType::int64:
            return {combine_int64[i], nullptr};
        case DType::uint64:
            return {combine_uint64[i], nullptr};
        case DType::float16:  // halves are computed in float32
        case DType::bfloat16:
        case DType::float32:
            return {combine_float32[i], divide_float32[i]};
        case DType::float64:
            return {combine_float64[i], divide_float64[i]};
        default:
            return {nullptr, nullptr};
    }
}

/// Blocks keep the accumulators, and a widened input, in the first-level cache.
constexpr size_t block_bytes = 8192;

/// Reduces `count` elements, at most a block of accumulators, that begin `offset` bytes into every array. `out` is
/// written only after the last input is read, since it may be any of them.
void reduce_block(const Kernels& run, Reduce op, Bytes* out, const void* const* inputs, size_t n_inputs, size_t offset,
                  size_t count) {
    alignas(64) Bytes acc[block_bytes];
    const auto input = [inputs, offset](size_t i) { return static_cast<const Bytes*>(inputs[i]) + offset; };
    const Bytes* left = input(0);
    for (size_t i = 1; i < n_inputs; ++i) {
        Bytes* to = i + 1 == n_inputs && op != Reduce::avg ? out + offset : acc;
        run.combine(op, to, left, input(i), count);
        left = acc;
    }
    if (op == Reduce::avg) run.divide(out + offset, acc, count, n_inputs);
}

/// The same for float16 and bfloat16: widened, computed in float32, rounded once.
void reduce_half_block(const Kernels& run, const HalfBlocks& half, Reduce op, Bytes* out, const void* const* inputs,
                       size_t n_inputs, size_t offset, size_t count) {
    alignas(64) Bytes acc[block_bytes];
    alignas(64) Bytes right[block_bytes];
    const auto input = [inputs, offset](size_t i) { return static_cast<const Bytes*>(inputs[i]) + offset; };
    half.widen(acc, input(0), count);
    for (size_t i = 1; i < n_inputs; ++i) {
        half.widen(right, input(i), count);
        run.combine(op, acc, acc, right, count);
    }
    if (op == Reduce::avg) run.divide(acc, acc, count, n_inputs);
    half.narrow(out + offset, acc, count);
}

}  // namespace

bool reduces(DType dtype, Reduce op) {
    const Arithmetic arithmetic = info(dtype).arithmetic;
    if (arithmetic == Arithmetic::none || op > Reduce::bxor) return false;
    if (arithmetic == Arithmetic::complex) return op == Reduce::sum || op == Reduce::avg;
    return arithmetic == Arithmetic::floating ? op <= Reduce::prod : op != Reduce::avg;
}

void reduce(DType dtype, Reduce op, void* out, const void* const* inputs, size_t n_inputs, size_t count) {
    reduce_on(best_isa(), dtype, op, out, inputs, n_inputs, count);
}

void reduce_on(Isa isa, DType dtype, Reduce op, void* out, const void* const* inputs, size_t n_inputs, size_t count) {
    if (!reduces(dtype, op)) {
        constexpr const char* names[] = {"sum", "avg", "min", "max", "prod", "band", "bor", "bxor"};
        const auto index = static_cast<size_t>(op);
        throw invalid_param("reduce op " + (op <= Reduce::bxor ? std::string(names[index]) : std::to_string(index)) +
                            " is not defined for dtype " + std::string(name_of(dtype)) +
                            "; expected sum, min, max or prod of bool, integers or float16, bfloat16, float32, "
                            "float64, avg of these floats, band, bor or bxor of bool or integers, or sum or avg of "
                            "complex numbers");
    }
    if (n_inputs == 0) throw invalid_param("n_inputs is 0, expected at least one source to reduce");
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
        if (dtype == DType::bool_) {
            run.combine(Reduce::max, to, from, from, count);  // x or x: 0 or 1
        } else if (to != from) {
            std::memcpy(to, from, count * size);
        }
        return;
    }
    if (dtype == DType::float16 || dtype == DType::bfloat16) {
        const HalfBlocks half = half_blocks(dtype, isa);
        constexpr size_t block = block_bytes / sizeof(float);
        for (size_t first = 0; first < count; first += block) {
            const size_t n = std::min(block, count - first);
            reduce_half_block(run, half, op, to, inputs, n_inputs, first * size, n);
        }
        return;
    }
    // Two inputs need no accumulator, so all of it is one block.
    const size_t block = n_inputs == 2 && op != Reduce::avg ? count : block_bytes / size;
    for (size_t first = 0; first < count; first += block) {
        reduce_block(run, op, to, inputs, n_inputs, first * size, std::min(block, count - first));
    }
}

}  // namespace alltoallv::kernel
