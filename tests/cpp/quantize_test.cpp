// The quantization kernels: every instruction set makes the bits of the plain one, and writes nowhere else. That these
// are the bits of the reference is in tests/quantized.
#include "op_kernel/cpu/quantize.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "kernel_reference.h"

using namespace alltoallv;          // NOLINT
using namespace alltoallv::kernel;  // NOLINT
using namespace kernel_reference;   // NOLINT

namespace {

using Bytes = std::vector<unsigned char>;

constexpr DType float_types[] = {DType::float32, DType::float16, DType::bfloat16};
constexpr Overflow overflows[] = {Overflow::saturate, Overflow::raise, Overflow::infinity};

/// Mostly of one size, sometimes of any, sometimes special.
float random_value() {
    static const float special[] = {
        0.0f,           -0.0f,     HUGE_VALF,   -HUGE_VALF, std::numeric_limits<float>::quiet_NaN(),
        0x1p-149f,      0x1p-126f, 0x1.8p-126f, 1e-39f,     3.4028234e38f,
        -3.4028234e38f, 65504,     65520};
    const uint32_t choice = random_bits() % 1000;
    if (choice == 0) return special[random_below(std::size(special))];
    if (choice == 1) return __builtin_bit_cast(float, static_cast<uint32_t>(random_bits()));
    return static_cast<float>(static_cast<int32_t>(random_bits())) * 0x1p-31f;
}

std::vector<float> random_floats(size_t count, float factor = 1) {
    std::vector<float> values(count);
    for (float& value : values) value = random_value() * factor;
    return values;
}

/// Values of a type at an odd address.
Bytes random_input(DType dtype, size_t count) {
    Bytes input(count * size_of(dtype) + 1);
    for (size_t k = 0; k < count; ++k) put(dtype, input.data() + 1, k, random_value());
    return input;
}

/// Codes at an odd address: any bits, or the bits of finite numbers.
Bytes random_codes(size_t bytes, bool finite = false) {
    Bytes codes(bytes + 1);
    for (unsigned char& code : codes) {
        const uint32_t bits = random_bits() & 0xFF;
        code = static_cast<unsigned char>(finite ? (bits & 0x80) | (bits & 0x7F) % 0x7C : bits);
    }
    return codes;
}

/// What kernels write, and what lies around it.
class Written {
  public:
    /// `write` gets so many bytes at an odd address, or where stores past the caches can go; it may report whether all
    /// fits.
    template <class Write>
    void bytes(size_t count, const Write& write, size_t place = 1) {
        Bytes memory(count + 256, 0xA5);
        const size_t base = place == 1 ? 1 : place - reinterpret_cast<uintptr_t>(memory.data()) % 64;
        if constexpr (std::is_void_v<decltype(write(memory.data()))>)
            write(memory.data() + base);
        else
            all_.push_back(write(memory.data() + base) ? 1 : 0);
        all_.insert(all_.end(), memory.begin() + static_cast<ptrdiff_t>(base) - 1,
                    memory.begin() + static_cast<ptrdiff_t>(base + count) + 64);
    }

    void floats(const std::vector<float>& values) {
        const auto* first = reinterpret_cast<const unsigned char*>(values.data());
        all_.insert(all_.end(), first, first + values.size() * sizeof(float));
    }

    const Bytes& all() const { return all_; }

  private:
    Bytes all_;
};

void expect_alike(const std::string& what, Isa isa, const std::function<void(Isa, Written&)>& call) {
    Written plain, other;
    call(Isa::base, plain);
    call(isa, other);
    EXPECT(plain.all() == other.all(), "%s, isa %d differs from the plain one", what.c_str(), static_cast<int>(isa));
}

void test_codes(const QuantFormat& format, DType dtype, size_t count, bool feedback, Isa isa) {
    const Bytes input = random_input(dtype, count);
    const Bytes any = random_codes(format.code_bytes(count), random_below(4) != 0 && format.bits() == 8);
    const std::vector<float> before = random_floats(count, 0.01f);
    const std::string what = std::string(info(format.codes).name) + ", group " + std::to_string(format.group_size) +
                             ", count " + std::to_string(count) + " of " + std::string(name_of(dtype));
    expect_alike(what, isa, [&](Isa by, Written& written) {
        std::vector<float> error = before, scales(format.scale_bytes(count) / sizeof(float) + 2, -1.0f);
        Bytes codes(format.code_bytes(count) + 1);
        written.bytes(format.code_bytes(count), [&](unsigned char* to) {
            quantize(format, dtype, input.data() + 1, count, to, scales.data(), feedback ? error.data() : nullptr, by);
            std::copy_n(to, format.code_bytes(count), codes.data() + 1);
        });
        written.floats(scales);
        written.floats(error);
        const void* of_codes[] = {codes.data() + 1, any.data() + 1, codes.data() + 1};
        const void* of_scales[] = {scales.data(), scales.data(), scales.data()};
        std::vector<float> sum(count + 1, -1.0f);
        for (const bool average : {true, false}) {
            dequantize_sum(format, of_codes, of_scales, 3, count, average, sum.data(), by);
            written.floats(sum);
        }
        for (const Overflow overflow : overflows) {
            const size_t bytes = count * size_of(dtype);
            written.bytes(bytes, [&](void* to) { return cast(dtype, overflow, sum.data(), count, to, by); });
            for (const size_t place : {1, 64, 80}) {
                written.bytes(
                    bytes,
                    [&](void* to) {
                        return dequantize(format, dtype, any.data() + 1, scales.data(), count, overflow, to, place > 1,
                                          by);
                    },
                    place);
            }
        }
    });
}

void test_shared(DType dtype, size_t n_sources, size_t n_scales, size_t count, float offset, Isa isa) {
    std::vector<Bytes> inputs;
    std::vector<const void*> pointers;
    for (size_t s = 0; s < n_sources; ++s) inputs.push_back(random_codes(count));
    for (const Bytes& input : inputs) pointers.push_back(input.data() + 1);
    const std::vector<float> values = random_floats(n_scales, random_below(64) == 0 ? 1e36f : 1.0f);
    const Scales scales{values.data(), n_scales, random_below(3 * n_scales)};
    const Bytes floats = random_input(dtype, count);
    const std::string what = "shared scale, " + std::to_string(n_sources) + " sources, " + std::to_string(n_scales) +
                             " scales, count " + std::to_string(count);
    expect_alike(what, isa, [&](Isa by, Written& written) {
        for (const Overflow overflow : overflows)
            written.bytes(count * size_of(dtype), [&](void* to) {
                return sum_shared_scale(dtype, pointers.data(), n_sources, count, scales, offset, overflow, to, by);
            });
        written.bytes(count, [&](void* to) { requantize_sum(pointers.data(), n_sources, count, scales, to, by); });
        written.bytes(count, [&](void* to) { quantize_scaled(dtype, floats.data() + 1, count, scales, to, by); });
    });
}

void expect_invalid(const char* message, const std::function<void()>& call) {
    const std::string said = testing::thrown(call);
    EXPECT(said.find(message) != std::string::npos, "expected an error '%s', got '%s'", message, said.c_str());
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
    for (int i = 1; i <= static_cast<int>(best_isa()); ++i) {
        const auto isa = static_cast<Isa>(i);
        for (const CodeFormat codes : {CodeFormat::int8, CodeFormat::int4}) {
            for (const size_t group : {1, 2, 3, 31, 32, 64, 127, 128, 1000, 2047, 2048, 2049, 4096, 5001}) {
                for (const size_t count : {size_t{0}, size_t{1}, group - 1, group, group + 1,
                                           3 * group + random_below(group) + 1, size_t{10007}})
                    for (const DType dtype : float_types)
                        for (const bool feedback : {false, true})
                            test_codes({codes, group}, dtype, count, feedback, isa);
            }
        }
        for (size_t row = 0; row < code_format_table.size(); ++row) {
            const auto codes = static_cast<CodeFormat>(row);
            if (codes == CodeFormat::int8 || codes == CodeFormat::int4) continue;  // above
            const size_t fixed = info(codes).group_size;
            for (const size_t group : {64, 128, 200, info(codes).shaped() ? 1000 : 4096}) {
                for (size_t count = 0; count < 12000; count = 3 * count / 2 + 61)
                    test_codes({codes, fixed == 0 ? group : fixed}, DType::float32, count, info(codes).shaped(), isa);
            }
        }
        for (const size_t n_scales : {1, 2, 3, 7, 64, 2047, 2048, 2049, 5000}) {
            for (const size_t count : {0, 1, 63, 2048, 2049, 9001}) {
                for (const DType dtype : float_types) {
                    const float offset = count == 63 ? HUGE_VALF : count % 2 == 0 ? 0.0f : random_value();
                    test_shared(dtype, 1 + random_below(9), n_scales, count, offset, isa);
                }
            }
        }
    }
    test_errors();
    return report("quantization");
}
