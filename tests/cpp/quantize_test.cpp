// The quantization kernels against scalar references written from docs/quantization.md, on every clone.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "kernel_reference.h"
#include "op_kernel/cpu/quantize.h"

using namespace alltoallv;          // NOLINT
using namespace alltoallv::kernel;  // NOLINT
using namespace kernel_reference;   // NOLINT

namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
constexpr DType float_types[] = {DType::float32, DType::float16, DType::bfloat16};
constexpr Overflow overflows[] = {Overflow::saturate, Overflow::raise, Overflow::infinity};

bool same(float a, float b) {
    return std::memcmp(&a, &b, sizeof(a)) == 0;
}

float positive_nan(float x) {
    return std::isnan(x) ? nan_value : x;
}

/// Mostly of one size, sometimes of any, sometimes special.
float random_value() {
    static const float special[] = {0.0f,        -0.0f,  HUGE_VALF,     -HUGE_VALF,     nan_value, 0x1p-149f, 0x1p-126f,
                                    0x1.8p-126f, 1e-39f, 3.4028234e38f, -3.4028234e38f, 65504,     65520};
    const uint32_t choice = random_bits() % 1000;
    if (choice == 0) return special[random_below(std::size(special))];
    if (choice == 1) return __builtin_bit_cast(float, static_cast<uint32_t>(random_bits()));
    return static_cast<float>(static_cast<int32_t>(random_bits())) * 0x1p-31f;
}

/// An array at an odd address.
class Unaligned {
  public:
    explicit Unaligned(size_t bytes) : memory_(bytes + 1 + guard_size, guard) {}
    unsigned char* data() { return memory_.data() + 1; }
    bool guard_intact() const {
        for (size_t k = memory_.size() - guard_size; k < memory_.size(); ++k) {
            if (memory_[k] != guard) return false;
        }
        return memory_[0] == guard;
    }

  private:
    static constexpr unsigned char guard = 0xA5;
    static constexpr size_t guard_size = 67;
    std::vector<unsigned char> memory_;
};

/// Code of an element: a byte, or half of one.
int code_at(const QuantFormat& format, const unsigned char* codes, size_t k) {
    if (format.bits() == 8) return static_cast<int8_t>(codes[k]);
    const size_t group = k / format.group_size, within = k % format.group_size;
    const unsigned char byte = codes[group * ((format.group_size + 1) / 2) + within / 2];
    const int nibble = within % 2 == 0 ? byte & 15 : byte >> 4;
    return nibble < 8 ? nibble : nibble - 16;
}

void expect_group(const QuantFormat& format, const std::vector<float>& x, const unsigned char* codes, float scale,
                  const float* error, size_t begin, size_t end, const char* what) {
    const float most = format.bits() == 8 ? 127 : 7;
    float largest = 0;
    bool any_nan = false;
    for (size_t k = begin; k < end; ++k) {
        any_nan |= std::isnan(x[k]);
        largest = std::fmax(largest, std::fabs(x[k]));
    }
    float want = std::fmax(largest / most, 0x1p-125f);
    while (!std::isinf(largest) && std::isinf(want * most)) want = std::nextafterf(want, 0);
    if (largest < std::numeric_limits<float>::min()) want = 0;
    if (any_nan) want = nan_value;
    EXPECT(same(scale, want), "%s: scale %a, not %a", what, scale, want);
    for (size_t k = begin; k < end; ++k) {
        int code = 0;
        if (std::isinf(want)) {
            code = std::isinf(x[k]) ? static_cast<int>(std::copysign(most, x[k])) : 0;
        } else if (!std::isnan(want) && want > 0) {
            code = static_cast<int>(std::nearbyint(x[k] * (1.0f / want)));
        }
        EXPECT(code_at(format, codes, k) == code, "%s: element %zu, %a / %a gives %d, not %d", what, k, x[k], scale,
               code_at(format, codes, k), code);
        EXPECT(std::abs(code) <= most, "%s: code %d", what, code);
        if (error == nullptr) continue;
        volatile const float product = static_cast<float>(code) * want;  // never fused
        const float lost = std::isfinite(want) ? x[k] - product : 0.0f;
        EXPECT(same(error[k], lost), "%s: error %a, not %a", what, error[k], lost);
    }
}

void test_quantize(const QuantFormat& format, DType dtype, size_t count, bool feedback, Isa isa) {
    const std::string what = "quantize " + std::string(name_of(dtype)) + " bits " + std::to_string(format.bits()) +
                             " group " + std::to_string(format.group_size) + " count " + std::to_string(count) +
                             " isa " + std::to_string(static_cast<int>(isa));
    Unaligned input(count * size_of(dtype)), codes(format.code_bytes(count));
    std::vector<float> x(count), error(count), scales(format.groups(count) + 1, -1.0f);
    for (size_t k = 0; k < count; ++k) {
        put(dtype, input.data(), k, random_value());
        error[k] = random_value() * 0.01f;
        volatile const float sum = get(dtype, input.data(), k) + error[k];
        x[k] = feedback ? sum : get(dtype, input.data(), k);
    }
    quantize(format, dtype, input.data(), count, codes.data(), scales.data(), feedback ? error.data() : nullptr, isa);
    for (size_t g = 0; g < format.groups(count); ++g) {
        expect_group(format, x, codes.data(), scales[g], feedback ? error.data() : nullptr, g * format.group_size,
                     std::min(count, (g + 1) * format.group_size), what.c_str());
        const size_t size = std::min(count - g * format.group_size, format.group_size);
        if (format.bits() == 4 && size % 2 == 1) {
            const size_t last = format.code_bytes(g * format.group_size) + size / 2;
            EXPECT(codes.data()[last] >> 4 == 0, "%s: half byte after group %zu", what.c_str(), g);
        }
    }
    EXPECT(scales.back() == -1.0f && codes.guard_intact(), "%s: wrote outside", what.c_str());
}

/// Rounds a float32 as the rule of `overflow` says; false if it did not fit.
bool expect_cast(DType dtype, Overflow overflow, float value, bool limited, float got, const char* what) {
    const HalfFormat half = dtype == DType::float16 ? f16 : bf16;
    const float largest = dtype == DType::float16 ? 65504.0f : dtype == DType::bfloat16 ? 0x1.FEp127f : 0x1.FFFFFEp127f;
    float want = dtype == DType::float32 ? value : static_cast<float>(decode(encode(value, half), half));
    const bool exceeds = limited && std::isinf(want);
    if (exceeds && overflow != Overflow::infinity) want = std::copysign(largest, value);
    if (std::isnan(value)) want = nan_value;
    EXPECT(same(got, want), "%s: %a becomes %a, not %a", what, value, got, want);
    return !exceeds;
}

void test_sums(const QuantFormat& format, DType dtype, Overflow overflow, size_t n_sources, size_t count, Isa isa) {
    const std::string what = "sum of " + std::to_string(n_sources) + " bits " + std::to_string(format.bits()) +
                             " group " + std::to_string(format.group_size) + " count " + std::to_string(count) +
                             " isa " + std::to_string(static_cast<int>(isa));
    std::vector<Unaligned> codes(n_sources, Unaligned(format.code_bytes(count)));
    std::vector<std::vector<float>> scales(n_sources, std::vector<float>(format.groups(count)));
    std::vector<const void*> code_pointers;
    std::vector<const void*> scale_pointers;
    for (size_t s = 0; s < n_sources; ++s) {
        for (size_t k = 0; k < format.code_bytes(count); ++k) codes[s].data()[k] = random_bits() & 0xFF;
        for (float& scale : scales[s]) scale = std::fabs(random_value()) * (random_bits() % 8 == 0 ? 1000.0f : 1.0f);
        code_pointers.push_back(codes[s].data());
        scale_pointers.push_back(scales[s].data());
    }
    for (const bool average : {false, true}) {
        std::vector<float> sum(count + 1, -1.0f);
        dequantize_sum(format, code_pointers.data(), scale_pointers.data(), n_sources, count, average, sum.data(), isa);
        for (size_t k = 0; k < count; ++k) {
            volatile float want = 0;
            for (size_t s = 0; s < n_sources; ++s) {
                volatile const float term =
                    static_cast<float>(code_at(format, codes[s].data(), k)) * scales[s][k / format.group_size];
                want = s == 0 ? term : want + term;
            }
            if (average) want = want / static_cast<float>(n_sources);
            EXPECT(same(sum[k], positive_nan(want)), "%s: %a, not %a", what.c_str(), sum[k], want);
        }
        EXPECT(sum.back() == -1.0f, "%s: wrote outside", what.c_str());
        if (average) continue;
        Unaligned out(count * size_of(dtype));
        bool fits = cast(dtype, overflow, sum.data(), count, out.data(), isa), all = true;
        for (size_t k = 0; k < count; ++k) {
            const bool limited = std::isfinite(sum[k]);
            all &= expect_cast(dtype, overflow, sum[k], limited, get(dtype, out.data(), k), "cast");
        }
        EXPECT(fits == (all || overflow != Overflow::raise) && out.guard_intact(), "%s: cast", what.c_str());
    }
    Unaligned out(count * size_of(dtype));
    const bool fits =
        dequantize(format, dtype, code_pointers[0], scale_pointers[0], count, overflow, out.data(), false, isa);
    for (const size_t away : {0, 16}) {  // of 64 bytes: where stores past the caches can go, and where not
        const size_t bytes = count * size_of(dtype), place = 64 + away;
        std::vector<unsigned char> memory(bytes + 256, 0xA5);
        const size_t base = place - reinterpret_cast<uintptr_t>(memory.data()) % 64;
        std::vector<unsigned char> want = memory;
        std::memcpy(want.data() + base, out.data(), bytes);
        EXPECT(dequantize(format, dtype, code_pointers[0], scale_pointers[0], count, overflow, memory.data() + base,
                          true, isa) == fits &&
                   memory == want,
               "%s: dequantize past the caches, %zu bytes away", what.c_str(), away);
    }
    bool all = true;
    for (size_t k = 0; k < count; ++k) {
        const float value = static_cast<float>(code_at(format, codes[0].data(), k)) * scales[0][k / format.group_size];
        const bool limited = dtype != DType::float32 && std::isfinite(value);
        all &= expect_cast(dtype, overflow, value, limited && std::isfinite(value), get(dtype, out.data(), k),
                           "dequantize");
    }
    EXPECT(fits == (all || overflow != Overflow::raise) && out.guard_intact(), "%s: dequantize", what.c_str());
}

void test_shared(DType dtype, Overflow overflow, size_t n_sources, size_t n_scales, size_t count, float offset,
                 Isa isa) {
    const std::string what = "shared scale, " + std::to_string(n_sources) + " sources, " + std::to_string(n_scales) +
                             " scales, count " + std::to_string(count) + " isa " +
                             std::to_string(static_cast<int>(isa));
    std::vector<Unaligned> inputs(n_sources, Unaligned(count));
    std::vector<const void*> pointers;
    for (Unaligned& input : inputs) {
        for (size_t k = 0; k < count; ++k) input.data()[k] = random_bits() & 0xFF;
        pointers.push_back(input.data());
    }
    std::vector<float> values(n_scales);
    for (float& scale : values) scale = random_value() * (random_bits() % 64 == 0 ? 1e36f : 1.0f);
    const Scales scales{values.data(), n_scales, random_below(3 * n_scales)};
    Unaligned out(count * size_of(dtype)), recoded(count), encoded(count);
    const bool fits =
        sum_shared_scale(dtype, pointers.data(), n_sources, count, scales, offset, overflow, out.data(), isa);
    requantize_sum(pointers.data(), n_sources, count, scales, recoded.data(), isa);
    quantize_scaled(dtype, out.data(), count, scales, encoded.data(), isa);
    const auto code_of = [](float value) {
        if (std::isnan(value)) return 0;
        return static_cast<int>(std::nearbyint(std::fmin(std::fmax(value, -127.0f), 127.0f)));
    };
    bool all = true;
    for (size_t k = 0; k < count; ++k) {
        const float scale = values[(scales.first + k) % n_scales];
        int sum = 0;
        for (Unaligned& input : inputs) sum += static_cast<int8_t>(input.data()[k]);
        volatile const float offsets = static_cast<float>(n_sources) * offset;
        volatile const float moved = static_cast<float>(sum) + offsets;
        const float result = get(dtype, out.data(), k);
        all &= expect_cast(dtype, overflow, moved * scale, std::isfinite(scale) && std::isfinite(offset), result,
                           what.c_str());
        const int want = code_of(static_cast<float>(sum) * scale), code = static_cast<int8_t>(recoded.data()[k]);
        EXPECT(code == want, "%s: %d * %a gives %d, not %d", what.c_str(), sum, scale, code, want);
        const int want_encoded = code_of(result * (1.0f / scale)), got = static_cast<int8_t>(encoded.data()[k]);
        EXPECT(got == want_encoded, "%s: %a / %a gives %d, not %d", what.c_str(), result, scale, got, want_encoded);
    }
    EXPECT(fits == (all || overflow != Overflow::raise), "%s", what.c_str());
    EXPECT(out.guard_intact() && recoded.guard_intact() && encoded.guard_intact(), "%s: outside", what.c_str());
}

void expect_invalid(const char* message, const std::function<void()>& call) {
    const std::string said = testing::thrown(call);
    EXPECT(said.find(message) != std::string::npos, "expected an error '%s', got '%s'", message, said.c_str());
}

/// Small floats, whose values the tests in Python know: every instruction set makes the bits of the plain one.
void test_alike(const QuantFormat& format, size_t count, Isa isa) {
    std::vector<float> x(count);
    for (float& value : x) value = random_value();
    std::vector<unsigned char> any(format.code_bytes(count) + 1);
    const bool finite = random_below(4) != 0 && format.bits() == 8;
    for (unsigned char& code : any) {
        const uint32_t bits = random_bits() & 0xFF;
        code = static_cast<unsigned char>(finite ? (bits & 0x80) | (bits & 0x7F) % 0x7C : bits);
    }
    const auto made = [&](Isa by) {
        std::vector<float> scales(format.scale_bytes(count) / sizeof(float) + 2), sum(count), values(count);
        std::vector<unsigned char> codes(any.size());
        quantize(format, DType::float32, x.data(), count, codes.data(), scales.data(), nullptr, by);
        const void* of_codes[] = {codes.data(), any.data(), codes.data()};
        const void* of_scales[] = {scales.data(), scales.data(), scales.data()};
        dequantize_sum(format, of_codes, of_scales, 3, count, false, sum.data(), by);
        dequantize(format, DType::float32, any.data(), scales.data(), count, Overflow::saturate, values.data(),
                   count % 3 == 0, by);
        for (const std::vector<float>* floats : {&scales, &sum, &values}) {
            const auto* first = reinterpret_cast<const unsigned char*>(floats->data());
            codes.insert(codes.end(), first, first + floats->size() * sizeof(float));
        }
        return codes;
    };
    EXPECT(made(Isa::base) == made(isa), "%s, group %zu, count %zu, isa %d differs from the plain one",
           std::string(info(format.codes).name).c_str(), format.group_size, count, static_cast<int>(isa));
}

void test_errors() {
    float x = 1;
    signed char code = 1;
    const void* codes = &code;
    const void* scales = &x;
    expect_invalid("group_size is 64, expected 32",
                   [&] { quantize({CodeFormat::mxfp8, 64}, DType::float32, &x, 1, &code, &x, nullptr); });
    expect_invalid("group_size is 0",
                   [&] { quantize({CodeFormat::int8, 0}, DType::float32, &x, 1, &code, &x, nullptr); });
    expect_invalid("dtype is int8", [&] { quantize({CodeFormat::int8, 1}, DType::int8, &x, 1, &code, &x, nullptr); });
    expect_invalid("n_sources is 0", [&] { dequantize_sum({CodeFormat::int8, 1}, &codes, &scales, 0, 1, false, &x); });
    expect_invalid("scales are empty", [&] { requantize_sum(&codes, 1, 1, {&x, 0}, &code); });
}

}  // namespace

int main() {
    for (int i = 0; i <= static_cast<int>(best_isa()); ++i) {
        const auto isa = static_cast<Isa>(i);
        for (const CodeFormat codes : {CodeFormat::int8, CodeFormat::int4}) {
            for (const size_t group : {1, 2, 3, 31, 32, 64, 127, 128, 1000, 2047, 2048, 2049, 4096, 5001}) {
                const QuantFormat format{codes, group};
                const size_t counts[] = {0, 1, group - 1, group, group + 1, 3 * group + random_below(group) + 1, 10007};
                for (const size_t count : counts) {
                    for (const DType dtype : float_types)
                        for (const bool feedback : {false, true}) test_quantize(format, dtype, count, feedback, isa);
                    for (const Overflow overflow : overflows)
                        test_sums(format, float_types[random_below(3)], overflow, 1 + random_below(5), count, isa);
                }
            }
        }
        for (const CodeFormat codes : {CodeFormat::fp8_e4m3, CodeFormat::fp8_e5m2, CodeFormat::mxfp8,
                                       CodeFormat::mxfp8_e5m2, CodeFormat::mxfp4, CodeFormat::nvfp4}) {
            const size_t fixed = info(codes).group_size;
            for (const size_t group : {64, 128, 200, 4096}) {
                for (size_t count = 0; count < 12000; count = 3 * count / 2 + 61)
                    test_alike({codes, fixed == 0 ? group : fixed}, count, isa);
            }
        }
        for (const size_t n_scales : {1, 2, 3, 7, 64, 2047, 2048, 2049, 5000}) {
            for (const size_t count : {0, 1, 63, 2048, 2049, 9001}) {
                for (const DType dtype : float_types) {
                    const float offset = count == 63 ? HUGE_VALF : count % 2 == 0 ? 0.0f : random_value();
                    test_shared(dtype, overflows[random_below(3)], 1 + random_below(9), n_scales, count, offset, isa);
                }
            }
        }
    }
    test_errors();
    return report("quantization");
}
