// Computes scales and codes of groups.
#include "op_kernel/cpu/quantize.h"

#include "op_kernel/cpu/half.h"
#include "op_kernel/cpu/quantize_blocks.h"
#include "op_kernel/cpu/scales.h"
#include "op_kernel/cpu/shape.h"
#include "op_kernel/cpu/sixty_four_lanes.h"

namespace alltoallv::kernel {
namespace {

using namespace quant;  // NOLINT

/// Memory to prefetch: `bytes_each` per element that is worked on now. Otherwise memory is idle while elements are in
/// the first-level cache.
struct Ahead {
    const void* at;
    size_t bytes_each;
};

/// Computes the codes of one group. Vector loops leave it what is short or has an extreme scale.
template <class Code>
ALLTOALLV_SHARED void encode_group_of(const void* x, float inverse, size_t n, Bytes* codes) {
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < n; ++k) {
        const auto bits = load<uint32_t>(x, k), magnitude = bits & 0x7FFFFFFFu;
        const uint32_t flushed = if_greater(least_normal, magnitude, 0u, magnitude) | (bits & 0x80000000u);
        codes[k] = static_cast<Bytes>(Code::encode(from_bits(Code::integer ? bits : flushed) * inverse));
    }
}

/// Computes codes of one type.
template <class Code, Isa isa>
ALLTOALLV_INLINE void codes_of_groups(const void* x, size_t count, size_t group_size, const float* inverses,
                                      Bytes* codes, const Ahead& ahead) {
    with_group_size(group_size, [=](auto size) ALLTOALLV_LAMBDA {
        each_group(count, size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
            const Bytes* next = static_cast<const Bytes*>(ahead.at) + begin * ahead.bytes_each;
            for (size_t at = 0; at < n * ahead.bytes_each; at += 64) __builtin_prefetch(next + at);
            const float inverse = inverses[g];
            const Bytes* from = static_cast<const Bytes*>(x) + begin * sizeof(float);
            size_t done = 0;
#if ALLTOALLV_HAS_CLONES
            if constexpr (isa == Isa::vbmi && !Code::integer) {
                if (n >= 64 && encodes_sixty_fours<Code>(inverse)) {
                    done = n / 64 * 64;
                    encode_sixty_fours<Code>(from, inverse, done, codes + begin);
                }
            }
            if constexpr (isa != Isa::base) {
                if (!Code::flushes(inverse)) {
                    const size_t more = (n - done) / 16 * 16;
                    encode_eights<Code>(from + done * sizeof(float), inverse, more, codes + begin + done);
                    done += more;
                }
            }
#endif
            if (done != n) encode_group_of<Code>(from + done * sizeof(float), inverse, n - done, codes + begin + done);
        });
    });
}

/// Computes error = x - code * scale. `x` may be `error`.
template <class Code>
ALLTOALLV_INLINE void errors_of_groups(const void* x, size_t count, size_t group_size, const float* scales,
                                       const Bytes* codes, float* error) {
    each_group(count, group_size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
        const float scale = scales[g];
        ALLTOALLV_INDEPENDENT
        for (size_t k = begin; k < begin + n; ++k) error[k] = load<float>(x, k) - Code::decode(codes[k]) * scale;
    });
}

template <class Code>
constexpr auto& encode =
    clones_by_isa<codes_of_groups<Code, Isa::base>, codes_of_groups<Code, Isa::v3>, codes_of_groups<Code, Isa::v4>,
                  codes_of_groups<Code, Code::integer ? Isa::v4 : Isa::vbmi>>;
template <class Code>
constexpr auto& lose = clones<errors_of_groups<Code>>;

ALLTOALLV_INLINE void add(const void* x, const float* y, size_t count, float* sum) {
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) sum[k] = load<float>(x, k) + y[k];
}

/// Packs int8 into nibbles, the even element in the low half; each group begins at a byte.
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

/// Packs the lowest bits of int8 into planes; each group begins at a byte.
ALLTOALLV_INLINE void pack_planes(const Bytes* codes, size_t count, size_t group_size, int bits, Bytes* packed) {
    const size_t stride = packed_bytes(bits, group_size);
    each_group(count, group_size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
        Bytes* to = packed + g * stride;
        const Bytes* from = codes + begin;
        int shift = 0;
        for (const int width : {4, 2, 1}) {
            if ((bits & width) == 0) continue;
            const size_t each = 8 / static_cast<size_t>(width);
            const int mask = (1 << width) - 1;
            for (size_t k = 0; k < n; k += each) {
                int byte = 0;
                for (size_t j = 0; j < each && k + j < n; ++j)
                    byte |= (from[k + j] >> shift & mask) << (static_cast<int>(j) * width);
                *to++ = static_cast<Bytes>(byte);
            }
            shift += width;
        }
    });
}

/// Computes code * scale of integers.
ALLTOALLV_INLINE void products_of_groups(const Bytes* codes, size_t count, size_t group_size, const float* scales,
                                         float* out) {
    each_group(count, group_size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
        const float scale = scales[g];
        ALLTOALLV_INDEPENDENT
        for (size_t k = begin; k < begin + n; ++k) out[k] = Integer::decode(codes[k]) * scale;
    });
}

ALLTOALLV_INLINE void subtract_all(const void* x, const float* y, size_t count, float* difference) {
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) difference[k] = load<float>(x, k) - y[k];
}

constexpr auto& largest = clones<largest_of_groups>;
constexpr auto& product = clones<products_of_groups>;
constexpr auto& subtract = clones<subtract_all>;
constexpr auto& pack_bits = clones<pack_planes>;
constexpr auto& add_error = clones<add>;
constexpr auto& pack = clones<pack_groups>;

/// Returns the bits of a magnitude if it is finite, else 0.
uint32_t if_finite(uint32_t magnitude) {
    return magnitude < infinity_bits ? magnitude : 0;
}

/// One call of quantize(), with its scratch of 53 KiB.
class Quantizer {
  public:
    /// `error_in` and `error_out` may be the same.
    Quantizer(const QuantFormat& format, DType dtype, Isa isa, const void* input, void* codes, void* scales,
              const float* error_in, float* error_out)
        : format_(format),
          dtype_(dtype),
          isa_(isa),
          input_(input),
          codes_(static_cast<Bytes*>(codes)),
          scales_(scales),
          floats_(static_cast<float*>(scales)),
          error_in_(error_in),
          error_out_(error_out) {}

    void run(size_t count) {
        if (info(format_.codes).scale == ScaleKind::e4m3) {
            if (format_.tensor == 0) format_.tensor = tensor_scale(largest_finite(count));
            std::memcpy(scales_, &format_.tensor, sizeof format_.tensor);
        }
        if (format_.group_size <= block) {
            each_piece(format_, count, [this](const Piece& piece) {
                const void* x = values(piece);
                const void* shaped = info(format_.codes).shaped() ? shape(piece, x) : x;
                const size_t groups = (piece.count + piece.group_size - 1) / piece.group_size;
                largest[isa_](shaped, piece.count, piece.group_size, magnitudes_);
                find_scales(piece.group, groups);
                write(piece, shaped);
                if (shaped != x && error_out_ != nullptr) lose_shaped(piece, x);
            });
            return;
        }
        for (size_t group = 0; group < format_.groups(count); ++group) {  // reads the input twice
            magnitudes_[0] = magnitude(count, group);
            find_scales(group, 1);
            write_group(count, group);
        }
    }

    uint32_t magnitude(size_t count, size_t group) {
        uint32_t most = 0;
        each_part(format_, count, group, [this, &most](const Piece& piece) {
            largest[isa_](values(piece), piece.count, piece.count, magnitudes_);
            most = std::max(most, magnitudes_[0]);
        });
        return most;
    }

    /// Returns the largest magnitude of groups without inf and NaN, which are not longer than a block.
    uint32_t largest_finite(size_t count) {
        uint32_t most = 0;
        each_piece(format_, count, [this, &most](const Piece& piece) {
            largest[isa_](values(piece), piece.count, piece.group_size, magnitudes_);
            const size_t groups = (piece.count + piece.group_size - 1) / piece.group_size;
            for (size_t g = 0; g < groups; ++g) most = std::max(most, if_finite(magnitudes_[g]));
        });
        return most;
    }

    /// Quantizes the only group by the given scale.
    void run_scaled(size_t count, float given) {
        const uint32_t magnitude = magnitude_of(given);
        inverses_[0] = magnitude == 0 || magnitude >= infinity_bits ? 0.0f : 1.0f / given;
        now_ = &given;
        write_group(count, 0);
    }

  private:
    /// Computes scales from the magnitudes of `groups` groups, which begin with `group`.
    void find_scales(size_t group, size_t groups) {
        const CodeFormatInfo& codes = info(format_.codes);
        group += format_.first_group;
        if (codes.scale == ScaleKind::float32) {
            float* found = format_.has_floats() ? floats_ + group : found_;
            scales_of_floats(format_.codes, magnitudes_, groups, found, inverses_, isa_);
            for (size_t g = 0; codes.has(rotated) && g < groups; ++g) {
                if (turned_[g] == 0) continue;
                found[g] = -found[g];
                inverses_[g] = -inverses_[g];
            }
            for (size_t g = 0; found == found_ && g < groups; ++g)
                std::memcpy(record(group + g), &found[g], sizeof(float));
            now_ = found;
            return;
        }
        Bytes* bytes = static_cast<Bytes*>(scales_) + (codes.scale == ScaleKind::e4m3 ? sizeof(float) : 0) + group;
        scales_of_bytes(format_.codes, magnitudes_, groups, format_.tensor, found_, inverses_, bytes);
        now_ = found_;
    }

    /// Returns where the scale of a group lies that has spikes behind it.
    Bytes* record(size_t group) { return static_cast<Bytes*>(scales_) + group * spiked_scale_bytes; }
    Bytes* spikes_of(const Piece& piece) { return record(format_.first_group + piece.group) + sizeof(float); }

    /// Returns a piece's values without spikes, rotated.
    const void* shape(const Piece& piece, const void* x) {
        std::memcpy(shaped_, x, piece.count * sizeof(float));
        if (info(format_.codes).has(spikes)) take_spikes(shaped_, piece.count, piece.group_size, spikes_of(piece));
        if (info(format_.codes).has(rotated)) turn_groups(shaped_, piece.count, piece.group_size, turned_, isa_);
        return shaped_;
    }

    /// Leaves x less what a decoder will make of a piece, whose codes are still unpacked; 0 in groups that are not
    /// finite.
    void lose_shaped(const Piece& piece, const void* x) {
        const Bytes* codes = format_.bits() == 8 ? codes_ + piece.code : unpacked_;
        float* error = error_out_ + piece.first;
        product[isa_](codes, piece.count, piece.group_size, now_, shaped_);
        if (info(format_.codes).has(rotated)) turn_back(now_, piece.count, piece.group_size, shaped_, isa_);
        if (info(format_.codes).has(spikes)) put_spikes(spikes_of(piece), piece.count, piece.group_size, shaped_);
        subtract[isa_](x, shaped_, piece.count, error);
        each_group(piece.count, piece.group_size, [=, this](size_t begin, size_t n, size_t g) {
            if (magnitude_of(now_[g]) >= infinity_bits) std::fill_n(error + begin, n, 0.0f);
        });
    }

    void write_group(size_t count, size_t group) {
        each_part(format_, count, group, [this](const Piece& piece) { write(piece, values(piece)); });
    }

    const void* values(const Piece& piece) {
        const void* x = widened(dtype_, isa_, input_, piece.first, piece.count, values_);
        if (error_in_ == nullptr) return x;
        add_error[isa_](x, error_in_ + piece.first, piece.count, values_);
        return values_;
    }

    void write(const Piece& piece, const void* x) {
        Bytes* codes = format_.bits() == 8 ? codes_ + piece.code : unpacked_;
        const float* scales = now_;
        const bool loses = error_out_ != nullptr && !info(format_.codes).shaped();
        float* error = loses ? error_out_ + piece.first : nullptr;
        const size_t width = size_of(dtype_);
        const Ahead ahead{static_cast<const Bytes*>(input_) + (piece.first + piece.count) * width, width};
        with_code(format_.codes, [&]<class Code>(Code) {
            encode<Code>[isa_](x, piece.count, piece.group_size, inverses_, codes, ahead);
            if (format_.bits() < 4) saturate(piece, scales, codes);
            if (error != nullptr) lose<Code>[isa_](x, piece.count, piece.group_size, scales, codes, error);
        });
        each_group(piece.count, piece.group_size, [=, this](size_t begin, size_t n, size_t g) {
            if (magnitude_of(scales[g]) >= infinity_bits) write_special(x, begin, n, scales[g], codes, error);
        });
        if (format_.bits() == 4) pack[isa_](codes, piece.count, packing_size(piece), codes_ + piece.code);
        if (format_.bits() != 4 && format_.bits() != 8)
            pack_bits[isa_](codes, piece.count, piece.group_size, format_.bits(), codes_ + piece.code);
    }

    void saturate(const Piece& piece, const float* scales, Bytes* codes) const {
        const int most = static_cast<int>(info(format_.codes).most);
        each_group(piece.count, piece.group_size, [=](size_t begin, size_t n, size_t g) {
            if (scales[g] != largest_inverted) return;
            for (size_t k = begin; k < begin + n; ++k)
                codes[k] = static_cast<Bytes>(std::clamp<int>(static_cast<int8_t>(codes[k]), -most, most));
        });
    }

    /// Quantizes a group with inf, which keeps its place; elsewhere code 0 times inf is NaN. Leaves no error feedback.
    void write_special(const void* x, size_t begin, size_t count, float scale_value, Bytes* codes, float* error) const {
        const CodeFormatInfo& format = info(format_.codes);
        const int largest_code = format.mantissa < 0    ? static_cast<int>(format.most)
                                 : format.mantissa == 3 ? 0x7E
                                                        : 0x7B;
        const int least_code = format.mantissa < 0 ? -largest_code : largest_code | 0x80;
        for (size_t k = begin; k < begin + count; ++k) {
            const uint32_t bits = bits_of(load<float>(x, k));
            const bool infinite = bits_of(scale_value) == infinity_bits && (bits & 0x7FFFFFFFu) == infinity_bits;
            const int code = !infinite ? 0 : bits == infinity_bits ? largest_code : least_code;
            codes[k] = static_cast<Bytes>(code);
        }
        if (error != nullptr) std::fill_n(error + begin, count, 0.0f);
    }

    QuantFormat format_;
    DType dtype_;
    Isa isa_;
    const void* input_;
    Bytes* codes_;
    void* scales_;
    float* floats_;               // the same, if they are float32
    const float* now_ = nullptr;  // of the piece's groups
    const float* error_in_;
    float* error_out_;
    alignas(64) float values_[block];
    alignas(64) uint32_t magnitudes_[block];
    alignas(64) float inverses_[block];
    alignas(64) float found_[block];
    alignas(64) float shaped_[block];
    alignas(64) Bytes turned_[block];
    alignas(64) Bytes unpacked_[block];
};

}  // namespace

void QuantFormat::check() const {
    const auto size = static_cast<int64_t>(group_size);
    if (takes_group(codes, size)) return;
    throw invalid_param(1070, "group_size is ", size, ", expected ", groups_taken(codes));
}

void quantize(const QuantFormat& format, DType dtype, const void* input, size_t count, void* codes, void* scales,
              float* error, Isa isa) {
    format.check();
    check_float(dtype);
    Quantizer(format, dtype, isa, input, codes, scales, error, error).run(count);
}

uint32_t largest_magnitude(DType dtype, const void* input, size_t count, const float* error, Isa isa) {
    check_float(dtype);
    if (count == 0) return 0;
    return Quantizer({CodeFormat::int8, count}, dtype, isa, input, nullptr, nullptr, error, nullptr)
        .magnitude(count, 0);
}

uint32_t largest_of_finite_groups(size_t group_size, DType dtype, const void* input, size_t count, const float* error,
                                  Isa isa) {
    check_float(dtype);
    return Quantizer({CodeFormat::nvfp4, group_size}, dtype, isa, input, nullptr, nullptr, error, nullptr)
        .largest_finite(count);
}

void encode_group(CodeFormat codes_kind, DType dtype, const void* input, size_t count, float scale_value, void* codes,
                  const float* error_in, float* error_out, Isa isa) {
    const QuantFormat format{codes_kind, std::max<size_t>(count, 1)};
    format.check();
    check_float(dtype);
    Quantizer(format, dtype, isa, input, codes, nullptr, error_in, error_out).run_scaled(count, scale_value);
}

}  // namespace alltoallv::kernel
