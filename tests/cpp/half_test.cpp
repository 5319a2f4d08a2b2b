// Half conversions, exhaustively over the halves, one by one and in blocks on every clone this machine runs.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernel_reference.h"
#include "op_kernel/cpu/half.h"
#include "op_kernel/cpu/half_blocks.h"

using namespace alltoallv;          // NOLINT
using namespace alltoallv::kernel;  // NOLINT
using namespace kernel_reference;   // NOLINT

namespace {

void test_half_patterns(const char* mode) {
    for (uint32_t i = 0; i < 65536; ++i) {
        const auto bits = static_cast<uint16_t>(i);
        const double want16 = decode(bits, f16), want_b16 = decode(bits, bf16);
        const float got16 = float16_to_float(bits), got_b16 = bfloat16_to_float(bits);
        if (std::isnan(want16)) {
            EXPECT(std::isnan(got16), "float16 %04x %s", i, mode);
            EXPECT(float_to_float16(got16) == (bits | 0x0200), "float16 %04x %s", i, mode);
        } else {
            EXPECT(got16 == want16 && std::signbit(got16) == std::signbit(want16), "float16 %04x %s", i, mode);
            EXPECT(float_to_float16(got16) == bits, "float16 %04x %s", i, mode);
        }
        // In flush-to-zero mode the comparison itself would take a bfloat16 subnormal for zero: compare bits.
        const auto wide = __builtin_bit_cast(uint32_t, got_b16);
        EXPECT(wide == i << 16, "bfloat16 %04x %s", i, mode);
        EXPECT(float_to_bfloat16(got_b16) == (std::isnan(want_b16) ? bits | 0x0040 : bits), "bfloat16 %04x %s", i,
               mode);
    }
}

uint64_t set_flush_to_zero(uint64_t flags, bool restore) {
    uint64_t old = 0;
#if defined(__x86_64__)
    old = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(static_cast<unsigned>(restore ? flags : old | 0x8040));
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    const uint64_t wanted = restore ? flags : old | (1u << 24);
    __asm__ volatile("msr fpcr, %0" ::"r"(wanted));
#else
    (void)flags, (void)restore;
#endif
    return old;
}

void test_half_rounding() {
    // Around every midpoint between neighbours, the float32 below, at, and above it.
    for (const DType dtype : {DType::float16, DType::bfloat16}) {
        const HalfFormat format = dtype == DType::float16 ? f16 : bf16;
        const uint32_t infinity = static_cast<uint32_t>(2 * format.bias + 1) << format.mantissa_bits;
        for (uint32_t i = 0; i + 1 < infinity; ++i) {
            const double low = decode(static_cast<uint16_t>(i), format),
                         high = decode(static_cast<uint16_t>(i + 1), format);
            const float middle = static_cast<float>((low + high) / 2);
            for (const float x : {std::nextafterf(middle, 0), middle, std::nextafterf(middle, HUGE_VALF)}) {
                for (const float signed_x : {x, -x}) {
                    const uint16_t got = narrow(dtype, signed_x);
                    EXPECT(got == encode(signed_x, format), "%a gives %04x, not %04x", signed_x, got,
                           encode(signed_x, format));
                }
            }
        }
    }
    for (int i = 0; i < 1 << 21; ++i) {
        const float x = __builtin_bit_cast(float, static_cast<uint32_t>(random_bits()));
        if (std::isnan(x)) continue;
        EXPECT(float_to_float16(x) == encode(x, f16), "%a", x);
        EXPECT(float_to_bfloat16(x) == encode(x, bf16), "%a", x);
    }
    for (const float x : {65519.99609375f, 65520.0f, 3.4e38f, HUGE_VALF, 0.0f, 0x1p-25f, 0x1.000002p-25f, 0x1p-149f}) {
        EXPECT(float_to_float16(x) == encode(x, f16) && float_to_float16(-x) == encode(-x, f16), "%a", x);
    }
}

/// The clones against the functions for one element, NaN payloads included.
void test_half_blocks() {
    for (const DType dtype : {DType::float16, DType::bfloat16}) {
        for (int isa = 0; isa <= static_cast<int>(best_isa()); ++isa) {
            const HalfBlocks blocks = half_blocks(dtype, static_cast<Isa>(isa));
            constexpr size_t n = 65536 + 7, odd = 3;  // every pattern, then a remainder; unaligned
            std::vector<unsigned char> halves(2 * n + odd), floats(4 * n + odd), back(2 * n + odd);
            for (size_t k = 0; k < n; ++k) {
                const auto half = static_cast<uint16_t>(k);
                std::memcpy(halves.data() + odd + 2 * k, &half, 2);
            }
            blocks.widen(floats.data() + odd, halves.data() + odd, n);
            blocks.narrow(back.data() + odd, floats.data() + odd, n);
            for (size_t k = 0; k < n; ++k) {
                const auto half = static_cast<uint16_t>(k);
                const float want = widen(dtype, half);
                const uint16_t want_back = narrow(dtype, want);
                EXPECT(std::memcmp(floats.data() + odd + 4 * k, &want, 4) == 0, "%04x, isa %d", half, isa);
                EXPECT(std::memcmp(back.data() + odd + 2 * k, &want_back, 2) == 0, "%04x, isa %d", half, isa);
            }
            for (size_t k = 0; k < n; ++k) {
                const auto any = static_cast<uint32_t>(random_bits());
                std::memcpy(floats.data() + odd + 4 * k, &any, 4);
            }
            blocks.narrow(back.data() + odd, floats.data() + odd, n);
            for (size_t k = 0; k < n; ++k) {
                float full;
                std::memcpy(&full, floats.data() + odd + 4 * k, 4);
                const uint16_t want = narrow(dtype, full);
                EXPECT(std::memcmp(back.data() + odd + 2 * k, &want, 2) == 0, "%a, isa %d", full, isa);
            }
        }
    }
}

}  // namespace

int main() {
    test_half_patterns("in the default mode");
    const uint64_t mode = set_flush_to_zero(0, false);
    test_half_patterns("in flush-to-zero mode");
    set_flush_to_zero(mode, true);
    test_half_rounding();
    test_half_blocks();
    return report("halves");
}
