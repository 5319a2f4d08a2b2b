// Reductions and streaming copies against scalar references, on every clone this machine runs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "kernel_reference.h"
#include "op_kernel/cpu/copy.h"
#include "op_kernel/cpu/reduce.h"
#include "runtime/base/error.h"

using namespace alltoallv;          // NOLINT
using namespace alltoallv::kernel;  // NOLINT
using namespace kernel_reference;   // NOLINT

namespace {

constexpr DType arithmetic[] = {DType::bool_,    DType::int8,    DType::uint8,  DType::int16,  DType::uint16,
                                DType::int32,    DType::uint32,  DType::int64,  DType::uint64, DType::float16,
                                DType::bfloat16, DType::float32, DType::float64};
constexpr ReduceOp ops[] = {ReduceOp::sum,  ReduceOp::avg,  ReduceOp::min, ReduceOp::max,
                            ReduceOp::prod, ReduceOp::band, ReduceOp::bor, ReduceOp::bxor};

// ---- reductions

template <class T>
T read(const unsigned char* from, size_t k) {
    T value;
    std::memcpy(&value, from + k * sizeof(T), sizeof(T));
    return value;
}

template <class T>
T combine_float(ReduceOp op, T a, T b) {
    if (op == ReduceOp::min || op == ReduceOp::max) {
        if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
        return (op == ReduceOp::min ? b < a : b > a) ? b : a;
    }
    return op == ReduceOp::prod ? a * b : a + b;
}

/// `element` gives input i's element as T; `done` writes the result.
template <class T, class Element>
T fold_float(ReduceOp op, size_t n_inputs, Element element) {
    T value = element(0);
    for (size_t i = 1; i < n_inputs; ++i) value = combine_float<T>(op, value, element(i));
    if (op == ReduceOp::avg) value /= static_cast<T>(n_inputs);
    return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
}

template <class T>
void reference_integers(ReduceOp op, unsigned char* out, const std::vector<const unsigned char*>& inputs, size_t k) {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    Wide value = read<T>(inputs[0], k);
    for (size_t i = 1; i < inputs.size(); ++i) {
        const Wide next = read<T>(inputs[i], k);
        const auto a = static_cast<uint64_t>(value), b = static_cast<uint64_t>(next);
        if (op == ReduceOp::sum) value = static_cast<Wide>(a + b);
        if (op == ReduceOp::prod) value = static_cast<Wide>(a * b);
        if (op == ReduceOp::min) value = std::min(value, next);
        if (op == ReduceOp::max) value = std::max(value, next);
        if (op == ReduceOp::band) value &= next;
        if (op == ReduceOp::bor) value |= next;
        if (op == ReduceOp::bxor) value ^= next;
    }
    const T narrow = static_cast<T>(value);
    std::memcpy(out + k * sizeof(T), &narrow, sizeof(T));
}

void reference(DType dtype, ReduceOp op, unsigned char* out, const std::vector<const unsigned char*>& in, size_t k) {
    const size_t n = in.size();
    const auto put = [&](auto value) { std::memcpy(out + k * sizeof(value), &value, sizeof(value)); };
    const auto half = [&](HalfFormat format) {
        if (n == 1) return put(read<uint16_t>(in[0], k));
        put(encode(fold_float<float>(
                       op, n, [&](size_t i) { return static_cast<float>(decode(read<uint16_t>(in[i], k), format)); }),
                   format));
    };
    switch (dtype) {
        case DType::bool_: {
            const bool any = std::any_of(in.begin(), in.end(), [k](const auto* p) { return p[k] != 0; });
            const bool all = std::all_of(in.begin(), in.end(), [k](const auto* p) { return p[k] != 0; });
            const auto odd = std::count_if(in.begin(), in.end(), [k](const auto* p) { return p[k] != 0; }) % 2 != 0;
            if (op == ReduceOp::bxor) return put(static_cast<uint8_t>(odd));
            const bool is_or = op == ReduceOp::sum || op == ReduceOp::max || op == ReduceOp::bor;
            return put(static_cast<uint8_t>(is_or ? any : all));
        }
        case DType::int8:
            return reference_integers<int8_t>(op, out, in, k);
        case DType::uint8:
            return reference_integers<uint8_t>(op, out, in, k);
        case DType::int16:
            return reference_integers<int16_t>(op, out, in, k);
        case DType::uint16:
            return reference_integers<uint16_t>(op, out, in, k);
        case DType::int32:
            return reference_integers<int32_t>(op, out, in, k);
        case DType::uint32:
            return reference_integers<uint32_t>(op, out, in, k);
        case DType::int64:
            return reference_integers<int64_t>(op, out, in, k);
        case DType::uint64:
            return reference_integers<uint64_t>(op, out, in, k);
        case DType::float16:
            return half(f16);
        case DType::bfloat16:
            return half(bf16);
        case DType::float32:
            if (n == 1) return put(read<uint32_t>(in[0], k));
            return put(fold_float<float>(op, n, [&](size_t i) { return read<float>(in[i], k); }));
        case DType::float64:
            if (n == 1) return put(read<uint64_t>(in[0], k));
            return put(fold_float<double>(op, n, [&](size_t i) { return read<double>(in[i], k); }));
        default:
            EXPECT(false, "no reference for %s", std::string(name_of(dtype)).c_str());
    }
}

/// Random bytes, of which floats are any value including NaN, inf and subnormals; `tame` makes most floats ordinary.
void fill(DType dtype, std::vector<unsigned char>& bytes, size_t offset, size_t count, bool tame) {
    for (auto& byte : bytes) byte = static_cast<unsigned char>(random_bits());
    if (dtype == DType::bool_) {
        for (auto& byte : bytes) byte = byte < 128 ? 0 : byte % 3;
    }
    constexpr uint16_t specials[] = {0x0000, 0x8000, 0x7C00, 0xFC00, 0x7F80, 0xFF80, 0x7FF0, 0xFFF0};
    const size_t size = size_of(dtype);
    if (!tame || dtype < DType::float16) return;
    for (size_t k = 0; k < count; ++k) {
        unsigned char* element = bytes.data() + offset + k * size;
        const bool special = random_below(16) == 0;
        const auto top = static_cast<uint16_t>(special ? specials[random_below(8)]
                                                       : 0x3C00 + random_below(0x200) + 0x8000 * random_below(2));
        if (special) std::memset(element, 0, size);
        std::memcpy(element + size - 2, &top, 2);  // little-endian: sign and exponent
    }
}

void test_reduce_case(DType dtype, ReduceOp op, size_t n_inputs, size_t count, bool tame) {
    const size_t bytes = count * size_of(dtype);
    constexpr size_t guard = 64;
    std::vector<std::vector<unsigned char>> sources(n_inputs);
    std::vector<size_t> offsets(n_inputs);
    std::vector<const unsigned char*> inputs(n_inputs);
    for (size_t i = 0; i < n_inputs; ++i) {
        offsets[i] = random_below(guard);
        sources[i].resize(bytes + 2 * guard);
        fill(dtype, sources[i], offsets[i], count, tame);
        inputs[i] = sources[i].data() + offsets[i];
    }
    std::vector<unsigned char> want(bytes);
    for (size_t k = 0; k < count; ++k) reference(dtype, op, want.data(), inputs, k);

    for (int isa = 0; isa <= static_cast<int>(best_isa()); ++isa) {
        for (const size_t alias : {n_inputs, size_t{0}, n_inputs - 1}) {  // n_inputs: none
            std::vector<unsigned char> own(bytes + 2 * guard, 0xA5);
            size_t offset = random_below(guard);
            std::vector<const void*> pointers(inputs.begin(), inputs.end());
            if (alias < n_inputs) {
                own = sources[alias];
                offset = offsets[alias];
                pointers[alias] = own.data() + offset;
            }
            auto expected = own;
            if (bytes != 0) std::memcpy(expected.data() + offset, want.data(), bytes);
            reduce_on(static_cast<Isa>(isa), dtype, op, own.data() + offset, pointers.data(), n_inputs, count);
            EXPECT(own == expected, "%s op %d, %zu inputs, count %zu, alias %zu, isa %d, tame %d",
                   std::string(name_of(dtype)).c_str(), static_cast<int>(op), n_inputs, count, alias, isa, tame);
        }
    }
}

void test_reduce() {
    for (const DType dtype : arithmetic) {
        for (const ReduceOp op : ops) {
            if (!reduces(dtype, op)) continue;
            for (size_t count = 0; count <= 70; ++count) {
                test_reduce_case(dtype, op, 1 + random_below(9), count, count % 2 == 0);
                test_reduce_case(dtype, op, 2, count, count % 2 != 0);
            }
            for (size_t n_inputs = 1; n_inputs <= 9; ++n_inputs) {
                for (const size_t count : {size_t{1025}, 1000 + random_below(9000)}) {
                    test_reduce_case(dtype, op, n_inputs, count, n_inputs % 2 == 0);
                }
            }
        }
    }
    // Ties keep the earlier operand, and the public entry takes the best clone.
    const float plus[] = {0.0f}, minus[] = {-0.0f};
    float out[1];
    const void* const zeros[] = {minus, plus, minus};
    for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
        reduce(DType::float32, op, out, zeros, 3, 1);
        EXPECT(std::signbit(out[0]), "op %d of -0, +0, -0", static_cast<int>(op));
        reduce(DType::float32, op, out, zeros + 1, 2, 1);
        EXPECT(!std::signbit(out[0]), "op %d of +0, -0", static_cast<int>(op));
    }
    const float complex[] = {1, 2, 3, 4}, other[] = {0.5f, -2, 1, 8};
    const void* const both[] = {complex, other};
    float mean[4];
    reduce(DType::complex64, ReduceOp::avg, mean, both, 2, 2);
    EXPECT(mean[0] == 0.75f && mean[1] == 0 && mean[2] == 2 && mean[3] == 6, "mean of complex numbers");
    const uint16_t big[] = {0x7BFF}, negative[] = {0xFBFF};  // 65504: the sum overflows float16 but not its accumulator
    uint16_t sum[1];
    const void* const three[] = {big, big, negative};
    reduce(DType::float16, ReduceOp::sum, sum, three, 3, 1);
    EXPECT(sum[0] == 0x7BFF, "%04x", sum[0]);
}

void test_refusals() {
    const unsigned char one[16] = {};
    unsigned char out[16];
    const void* const inputs[] = {one, one};
    const auto refused = [&](DType dtype, ReduceOp op, size_t n_inputs) {
        try {
            reduce(dtype, op, out, inputs, n_inputs, 1);
        } catch (const Error& error) {
            return error.kind() == ErrorClass::invalid_param && error.code() == ErrorType::INVALID_PARAM;
        }
        return false;
    };
    for (size_t i = 0; i < dtype_table.size(); ++i) {
        const auto dtype = static_cast<DType>(i);
        const Arithmetic kind = info(dtype).arithmetic;
        const bool is_float = kind == Arithmetic::floating, is_complex = kind == Arithmetic::complex;
        const bool known = kind != Arithmetic::none && !is_complex;
        for (const ReduceOp op : ops) {
            const bool defined = is_complex            ? op <= ReduceOp::avg
                                 : op == ReduceOp::avg ? is_float
                                 : op > ReduceOp::prod ? known && !is_float
                                                       : known;
            EXPECT(reduces(dtype, op) == defined, "%zu op %d", i, static_cast<int>(op));
            EXPECT(refused(dtype, op, 2) == !defined, "%zu op %d", i, static_cast<int>(op));
        }
    }
    EXPECT(refused(DType::float32, ReduceOp::sum, 0), "n_inputs 0");
    EXPECT(refused(DType::float32, static_cast<ReduceOp>(9), 2), "op 9");
}

// ---- copies

void test_copy_case(size_t bytes, size_t to_offset, size_t from_offset) {
    constexpr size_t guard = 4096 + 64;
    std::vector<unsigned char> from(bytes + guard), to(bytes + 2 * guard, 0x5A);
    for (size_t k = 0; k < from.size(); ++k) from[k] = static_cast<unsigned char>((k * 2654435761u) >> 11);
    std::vector<unsigned char> expected = to;
    if (bytes != 0) std::memcpy(expected.data() + 64 + to_offset, from.data() + from_offset, bytes);
    const auto check = [&](int isa, size_t streams) {
        EXPECT(to == expected, "%zu bytes to +%zu from +%zu, isa %d, %zu streams", bytes, to_offset, from_offset, isa,
               streams);
        std::fill(to.begin(), to.end(), static_cast<unsigned char>(0x5A));
    };
    for (int isa = 0; isa <= static_cast<int>(best_isa()); ++isa) {
        for (const size_t streams : {1, 4}) {
            copy_streaming_on(static_cast<Isa>(isa), streams, to.data() + 64 + to_offset, from.data() + from_offset,
                              bytes);
            check(isa, streams);
        }
    }
    copy_streaming(to.data() + 64 + to_offset, from.data() + from_offset, bytes);
    check(-1, 0);
}

void test_copy() {
    for (size_t bytes = 0; bytes <= 300; ++bytes) {
        for (const size_t offset : {0, 1, 31, 63}) test_copy_case(bytes, offset, random_below(64));
    }
    for (const size_t bytes : {4095, 4096, 16383, 16384, 20479, 20480, 20481, 36864, 65536, 100000}) {
        for (int i = 0; i < 4; ++i) test_copy_case(bytes, random_below(4096), random_below(64));
        test_copy_case(bytes, 0, 0);
    }
    for (const size_t mebibytes : {1, 3, 8}) test_copy_case((mebibytes << 20) + random_below(5000), 17, 3);
}

}  // namespace

int main() {
    test_reduce();
    test_refusals();
    test_copy();
    return report("kernels");
}
