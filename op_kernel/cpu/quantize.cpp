/// \file quantize.cpp
/// \brief Scales and codes of groups.
#include "op_kernel/cpu/quantize.h"

#include "op_kernel/cpu/eight_lanes.h"
#include "op_kernel/cpu/half.h"
#include "op_kernel/cpu/quantize_blocks.h"

namespace alltoallv::kernel {
namespace {

using namespace quant;  // NOLINT

constexpr uint32_t least_normal = 1u << 23;  // 2^-126
/// Bounds of a scale. From 2^-125 on, the quotient of a subnormal rounds to 0 whether or not the processor keeps
/// subnormals; above the largest, the largest code would be dequantized to inf.
constexpr float least_scale = 0x1p-125f;
constexpr float largest_scale_8 = 0x1.020406p+121f;  // 127 times it is finite
constexpr float largest_scale_4 = 0x1.249248p+125f;  // 7 times it is finite

/// The largest magnitude of each group, as bits: their order is that of the values, and NaN is above inf.
ALLTOALLV_INLINE void largest_of_groups(const void* x, size_t count, size_t group_size, uint32_t* out) {
    with_group_size(group_size, [=](auto size) ALLTOALLV_LAMBDA {
        each_group(count, size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
            int32_t most = 0;
            for (size_t k = 0; k < n; ++k) {
                const auto magnitude = static_cast<int32_t>(magnitude_of(load<float>(x, begin + k)));
                most = magnitude > most ? magnitude : most;
            }
            out[g] = static_cast<uint32_t>(most);
        });
    });
}

/// Scales and their inverses, which are 0 where codes do not depend on them: scale 0, inf, NaN.
ALLTOALLV_INLINE void scales_of_groups(const uint32_t* magnitudes, size_t groups, int bits, float* scales,
                                       float* inverses) {
    const float largest_code = bits == 8 ? 127.0f : 7.0f;
    const float largest_scale = bits == 8 ? largest_scale_8 : largest_scale_4;
    ALLTOALLV_INDEPENDENT
    for (size_t g = 0; g < groups; ++g) {
        const uint32_t magnitude = magnitudes[g];
        float scale = from_bits(magnitude) / largest_code;
        scale = scale < least_scale ? least_scale : scale;
        scale = scale > largest_scale ? largest_scale : scale;
        const uint32_t special = if_greater(magnitude, infinity_bits, nan_bits, infinity_bits);
        const uint32_t some = if_greater(least_normal, magnitude, 0u, bits_of(scale));
        const uint32_t inverse = if_greater(least_normal, magnitude, 0u, bits_of(1.0f / scale));
        scales[g] = from_bits(if_greater(infinity_bits, magnitude, some, special));
        inverses[g] = from_bits(if_greater(infinity_bits, magnitude, inverse, 0u));
    }
}

/// What is read next, `bytes_each` per element that is worked on now. Elements that lie in the first-level cache let
/// the memory idle otherwise.
struct Ahead {
    const void* at;
    size_t bytes_each;
};

template <Isa isa>
ALLTOALLV_INLINE void codes_of_groups(const void* x, size_t count, size_t group_size, const float* inverses,
                                      Bytes* codes, const Ahead& ahead) {
    with_group_size(group_size, [=](auto size) ALLTOALLV_LAMBDA {
        each_group(count, size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
            const Bytes* next = static_cast<const Bytes*>(ahead.at) + begin * ahead.bytes_each;
            for (size_t at = 0; at < n * ahead.bytes_each; at += 64) __builtin_prefetch(next + at);
            const float inverse = inverses[g];
            size_t done = 0;
#if ALLTOALLV_HAS_CLONES
            if constexpr (isa == Isa::v3) {
                done = n / 32 * 32;
                encode_eight(static_cast<const Bytes*>(x) + begin * sizeof(float), inverse, done, codes + begin);
            }
#endif
            ALLTOALLV_INDEPENDENT
            for (size_t k = done; k < n; ++k) store(codes, begin + k, round_code(load<float>(x, begin + k) * inverse));
        });
    });
}

/// error = x - code * scale. `x` may be `error`.
ALLTOALLV_INLINE void errors_of_groups(const void* x, size_t count, size_t group_size, const float* scales,
                                       const Bytes* codes, float* error) {
    each_group(count, group_size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
        const float scale = scales[g];
        ALLTOALLV_INDEPENDENT
        for (size_t k = begin; k < begin + n; ++k) {
            error[k] = load<float>(x, k) - static_cast<float>(load<int8_t>(codes, k)) * scale;
        }
    });
}

ALLTOALLV_INLINE void add(const void* x, const float* y, size_t count, float* sum) {
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) sum[k] = load<float>(x, k) + y[k];
}

/// int8 to nibbles, the even element in the low half; each group begins at a byte.
ALLTOALLV_INLINE void pack_groups(const Bytes* codes, size_t count, size_t group_size, Bytes* packed) {
    const size_t stride = group_size / 2 + group_size % 2;
    each_group(count, group_size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
        Bytes* to = packed + g * stride;
        const Bytes* from = codes + begin;
        ALLTOALLV_INDEPENDENT
        for (size_t k = 0; k < n / 2; ++k) {
            const uint16_t pair = load<uint16_t>(from, k);
            to[k] = static_cast<Bytes>((pair & 0x0Fu) | (pair >> 4 & 0xF0u));
        }
        if (n % 2 != 0) to[n / 2] = from[n - 1] & 0x0Fu;
    });
}

ALLTOALLV_CLONES(largest, largest_of_groups, (const void* x, size_t count, size_t group_size, uint32_t* out),
                 (x, count, group_size, out))
ALLTOALLV_CLONES(scale, scales_of_groups,
                 (const uint32_t* magnitudes, size_t groups, int bits, float* scales, float* inverses),
                 (magnitudes, groups, bits, scales, inverses))
ALLTOALLV_CLONES_BY_ISA(encode, codes_of_groups,
                        (const void* x, size_t count, size_t group_size, const float* inverses, Bytes* codes,
                         const Ahead& ahead),
                        (x, count, group_size, inverses, codes, ahead))
ALLTOALLV_CLONES(lose, errors_of_groups,
                 (const void* x, size_t count, size_t group_size, const float* scales, const Bytes* codes,
                  float* error),
                 (x, count, group_size, scales, codes, error))
ALLTOALLV_CLONES(add_error, add, (const void* x, const float* y, size_t count, float* sum), (x, y, count, sum))
ALLTOALLV_CLONES(pack, pack_groups, (const Bytes* codes, size_t count, size_t group_size, Bytes* packed),
                 (codes, count, group_size, packed))

/// One call of quantize(), with its scratch of 26 KiB.
class Quantizer {
  public:
    /// `error_in` and `error_out` may be the same.
    Quantizer(const QuantFormat& format, DType dtype, Isa isa, const void* input, void* codes, float* scales,
              const float* error_in, float* error_out)
        : format_(format),
          dtype_(dtype),
          isa_(isa),
          i_(static_cast<size_t>(isa)),
          input_(input),
          codes_(static_cast<Bytes*>(codes)),
          scales_(scales),
          error_in_(error_in),
          error_out_(error_out) {}

    void run(size_t count) {
        if (format_.group_size <= block) {
            each_piece(format_, count, [this](const Piece& piece) {
                const void* x = values(piece);
                const size_t groups = (piece.count + piece.group_size - 1) / piece.group_size;
                largest[i_](x, piece.count, piece.group_size, magnitudes_);
                scale[i_](magnitudes_, groups, format_.bits, scales_ + piece.group, inverses_);
                write(piece, x);
            });
            return;
        }
        for (size_t group = 0; group < format_.groups(count); ++group) {  // read twice
            magnitudes_[0] = magnitude(count, group);
            scale[i_](magnitudes_, 1, format_.bits, scales_ + group, inverses_);
            write_group(count, group);
        }
    }

    uint32_t magnitude(size_t count, size_t group) {
        uint32_t most = 0;
        each_part(format_, count, group, [this, &most](const Piece& piece) {
            largest[i_](values(piece), piece.count, piece.count, magnitudes_);
            most = std::max(most, magnitudes_[0]);
        });
        return most;
    }

    /// The only group, by a scale that is given.
    void run_scaled(size_t count, float given) {
        const uint32_t magnitude = magnitude_of(given);
        inverses_[0] = magnitude == 0 || magnitude >= infinity_bits ? 0.0f : 1.0f / given;
        scales_ = &given;
        write_group(count, 0);
    }

  private:
    void write_group(size_t count, size_t group) {
        each_part(format_, count, group, [this](const Piece& piece) { write(piece, values(piece)); });
    }

    const void* values(const Piece& piece) {
        const void* x = widened(dtype_, isa_, input_, piece.first, piece.count, values_);
        if (error_in_ == nullptr) return x;
        add_error[i_](x, error_in_ + piece.first, piece.count, values_);
        return values_;
    }

    void write(const Piece& piece, const void* x) {
        Bytes* codes = format_.bits == 8 ? codes_ + piece.code : unpacked_;
        const float* scales = scales_ + piece.group;
        float* error = error_out_ == nullptr ? nullptr : error_out_ + piece.first;
        const size_t width = size_of(dtype_);
        const Ahead ahead{static_cast<const Bytes*>(input_) + (piece.first + piece.count) * width, width};
        encode[i_](x, piece.count, piece.group_size, inverses_, codes, ahead);
        if (error != nullptr) lose[i_](x, piece.count, piece.group_size, scales, codes, error);
        each_group(piece.count, piece.group_size, [=, this](size_t begin, size_t n, size_t g) {
            if (magnitude_of(scales[g]) >= infinity_bits) write_special(x, begin, n, scales[g], codes, error);
        });
        if (format_.bits == 4) pack[i_](codes, piece.count, packing_size(piece), codes_ + piece.code);
    }

    /// A group with inf keeps it in place, and code 0 times inf is NaN elsewhere. Nothing of it is carried over.
    void write_special(const void* x, size_t begin, size_t count, float scale_value, Bytes* codes, float* error) const {
        const int largest_code = format_.bits == 8 ? 127 : 7;
        for (size_t k = begin; k < begin + count; ++k) {
            const uint32_t bits = bits_of(load<float>(x, k));
            const bool infinite = bits_of(scale_value) == infinity_bits && (bits & 0x7FFFFFFFu) == infinity_bits;
            const int code = !infinite ? 0 : bits == infinity_bits ? largest_code : -largest_code;
            codes[k] = static_cast<Bytes>(code);
        }
        if (error != nullptr) std::fill_n(error + begin, count, 0.0f);
    }

    QuantFormat format_;
    DType dtype_;
    Isa isa_;
    size_t i_;  // of the clones
    const void* input_;
    Bytes* codes_;
    float* scales_;
    const float* error_in_;
    float* error_out_;
    alignas(64) float values_[block];
    alignas(64) uint32_t magnitudes_[block];
    alignas(64) float inverses_[block];
    alignas(64) Bytes unpacked_[block];
};

}  // namespace

void QuantFormat::check() const {
    if (bits != 4 && bits != 8) throw invalid_param("bits is " + std::to_string(bits) + ", expected 4 or 8");
    if (group_size == 0) throw invalid_param("group_size is 0, expected at least 1 element");
}

void quantize(const QuantFormat& format, DType dtype, const void* input, size_t count, void* codes, float* scales,
              float* error, Isa isa) {
    format.check();
    check_float(dtype);
    Quantizer(format, dtype, isa, input, codes, scales, error, error).run(count);
}

uint32_t largest_magnitude(DType dtype, const void* input, size_t count, const float* error, Isa isa) {
    check_float(dtype);
    if (count == 0) return 0;
    return Quantizer({8, count}, dtype, isa, input, nullptr, nullptr, error, nullptr).magnitude(count, 0);
}

float scale_of(int bits, uint32_t magnitude) {
    float scale_value = 0, inverse = 0;
    scale[0](&magnitude, 1, bits, &scale_value, &inverse);
    return scale_value;
}

void encode_group(int bits, DType dtype, const void* input, size_t count, float scale_value, void* codes,
                  const float* error_in, float* error_out, Isa isa) {
    const QuantFormat format{bits, std::max<size_t>(count, 1)};
    format.check();
    check_float(dtype);
    Quantizer(format, dtype, isa, input, codes, nullptr, error_in, error_out).run_scaled(count, scale_value);
}

}  // namespace alltoallv::kernel
