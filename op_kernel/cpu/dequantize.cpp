// Computes values and sums of codes, and rounds them to the output type.
#include "op_kernel/cpu/half.h"
#include "op_kernel/cpu/quantize.h"
#include "op_kernel/cpu/quantize_blocks.h"
#include "op_kernel/cpu/scales.h"
#include "op_kernel/cpu/shape.h"
#include "op_kernel/cpu/sixty_four_lanes.h"

namespace alltoallv::kernel {
namespace {

using namespace quant;  // NOLINT

/// Unpacks nibbles to int8.
ALLTOALLV_INLINE void unpack_groups(const Bytes* packed, size_t count, size_t group_size, Bytes* codes) {
    const size_t stride = group_size / 2 + group_size % 2;
    each_group(count, group_size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
        const Bytes* from = packed + g * stride;
        Bytes* to = codes + begin;
        ALLTOALLV_INDEPENDENT
        for (size_t k = 0; k < n / 2; ++k) {
            const auto pair = static_cast<uint16_t>((from[k] | from[k] << 4) & 0x0F0F);
            store(to, k, static_cast<uint16_t>(pair | (pair & 0x0808) * 0x1E));  // extends both signs
        }
        if (n % 2 != 0) to[n - 1] = static_cast<Bytes>(((from[n / 2] & 0x0F) ^ 8) - 8);
    });
}

/// Unpacks planes of bits to int8.
ALLTOALLV_INLINE void unpack_planes(const Bytes* packed, size_t count, size_t group_size, int bits, Bytes* codes) {
    const size_t stride = packed_bytes(bits, group_size);
    const int top = 1 << (bits - 1);
    each_group(count, group_size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
        const Bytes* from = packed + g * stride;
        Bytes* to = codes + begin;
        int shift = 0;
        std::fill_n(to, n, Bytes{0});
        for (const int width : {4, 2, 1}) {
            if ((bits & width) == 0) continue;
            const size_t each = 8 / static_cast<size_t>(width);
            const int mask = (1 << width) - 1;
            for (size_t k = 0; k < n; k += each, ++from)
                for (size_t j = 0; j < each && k + j < n; ++j)
                    to[k + j] |= static_cast<Bytes>((*from >> (static_cast<int>(j) * width) & mask) << shift);
            shift += width;
        }
        ALLTOALLV_INDEPENDENT
        for (size_t k = 0; k < n; ++k) to[k] = static_cast<Bytes>((to[k] ^ top) - top);  // extends the sign
    });
}

/// One side of a sum; `codes` of the other may be null.
struct Term {
    const void* codes;
    const float* scales;
};

/// Sums one group; `b` may be null, `scale_b` is 0 then. Finite products have sums that make no NaN and keep an
/// existing one. Vector loops leave it what is short or not finite.
template <class Code, bool finite, bool resumes>
ALLTOALLV_SHARED void add_group(const Bytes* a, float scale_a, const Bytes* b, float scale_b, size_t n, Bytes* sum) {
    const auto product = [](const Bytes* codes, size_t k, float scale)
                             ALLTOALLV_LAMBDA { return Code::decode(codes[k]) * scale; };
    const auto keep = [=](size_t k, float total)
                          ALLTOALLV_LAMBDA { store(sum, k, finite ? total : canonical_nan(total)); };
    const auto with_a = [=](size_t k) ALLTOALLV_LAMBDA {
        const float first = product(a, k, scale_a);
        return resumes ? load<float>(sum, k) + first : first;
    };
    if (b == nullptr) {
        ALLTOALLV_INDEPENDENT
        for (size_t k = 0; k < n; ++k) keep(k, with_a(k));
    } else {
        ALLTOALLV_INDEPENDENT
        for (size_t k = 0; k < n; ++k) keep(k, with_a(k) + product(b, k, scale_b));
    }
}

/// Sums codes of one type. Sum::stream stores values past the caches; groups then have a multiple of 8 elements and
/// begin at multiples of 32 bytes.
template <class Code, Sum kind>
struct Decoder {
    template <Isa isa>
    ALLTOALLV_INLINE static void add_finite_group(const Bytes* a, float scale_a, const Bytes* b, float scale_b,
                                                  size_t n, Bytes* sum) {
        size_t done = 0;
#if ALLTOALLV_HAS_CLONES
        if constexpr (isa == Isa::vbmi && !Code::integer) {
            done = n / 64 * 64;
            if (done != 0) add_sixty_fours<Code, kind>(a, scale_a, b, scale_b, done, sum);
        }
        if constexpr (isa != Isa::base) {
            const size_t more = (n - done) / 16 * 16;
            add_eights<Code, kind>(a + done, scale_a, b == nullptr ? nullptr : b + done, scale_b, more,
                                   sum + done * sizeof(float));
            done += more;
        }
#endif
        if (done == n) return;
        add_group<Code, true, kind == Sum::resume>(a + done, scale_a, b == nullptr ? nullptr : b + done, scale_b,
                                                   n - done, sum + done * sizeof(float));
    }

    template <Isa isa>
    ALLTOALLV_INLINE static void add_terms(const Term& a, const Term& b, size_t count, size_t group_size, void* sum) {
        const bool plain = Code::plain(a.codes, count) && (b.codes == nullptr || Code::plain(b.codes, count));
        each_group(count, group_size, [=](size_t begin, size_t n, size_t g) ALLTOALLV_LAMBDA {
            const float scale_a = a.scales[g], scale_b = b.codes == nullptr ? 0.0f : b.scales[g];
            const auto* codes_a = static_cast<const Bytes*>(a.codes) + begin;
            const auto* codes_b = b.codes == nullptr ? nullptr : static_cast<const Bytes*>(b.codes) + begin;
            auto* to = static_cast<Bytes*>(sum) + begin * sizeof(float);
            if (plain && magnitude_of(scale_a) <= Code::most_scale && magnitude_of(scale_b) <= Code::most_scale)
                add_finite_group<isa>(codes_a, scale_a, codes_b, scale_b, n, to);
            else
                add_group<Code, false, kind == Sum::resume>(codes_a, scale_a, codes_b, scale_b, n, to);
        });
    }
};

/// Sums the codes of a format.
struct Add {
    using Function = void (*)(const Term& a, const Term& b, size_t count, size_t group_size, void* sum);
    Function start, resume, stream;
};

template <class Code, Sum kind>
constexpr auto& add_clones =
    clones_by_isa<Decoder<Code, kind>::template add_terms<Isa::base>, Decoder<Code, kind>::template add_terms<Isa::v3>,
                  Decoder<Code, kind>::template add_terms<Isa::v4>,
                  Decoder<Code, kind>::template add_terms<Code::integer ? Isa::v4 : Isa::vbmi>>;

Add add_of(CodeFormat format, Isa isa) {
    return with_code(format, [isa]<class Code>(Code) {
        return Add{add_clones<Code, Sum::start>[isa], add_clones<Code, Sum::resume>[isa],
                   add_clones<Code, Sum::stream>[isa]};
    });
}

ALLTOALLV_INLINE void divide_all(float* x, size_t count, float divisor) {
    for (size_t k = 0; k < count; ++k) x[k] = canonical_nan(x[k] / divisor);
}

/// Limits finite values above the type's range to its largest one; sets `exceeded` if there were any.
ALLTOALLV_INLINE void limit_all(const float* in, size_t count, const Limit& limit, float* out, bool* exceeded) {
    int32_t most = 0;
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) {
        const uint32_t magnitude = magnitude_of(in[k]);
        const uint32_t sign = bits_of(in[k]) & 0x80000000u;
        const uint32_t finite = if_greater(infinity_bits, magnitude, magnitude, 0u);
        most = static_cast<int32_t>(finite) > most ? static_cast<int32_t>(finite) : most;
        const uint32_t limited = if_greater(finite, limit.largest, limit.largest, magnitude);
        out[k] = from_bits(limited | sign);
    }
    *exceeded = static_cast<uint32_t>(most) >= limit.too_large;
}

ALLTOALLV_INLINE void accumulate_all(const float* x, size_t count, float* sum) {
    ALLTOALLV_INDEPENDENT
    for (size_t k = 0; k < count; ++k) sum[k] = canonical_nan(sum[k] + x[k]);
}

constexpr auto& accumulate = clones<accumulate_all>;
constexpr auto& unpack = clones<unpack_groups>;
constexpr auto& unpack_bits = clones<unpack_planes>;
constexpr auto& divide = clones<divide_all>;
constexpr auto& limit = clones<limit_all>;

/// Returns the codes of a piece as int8: in place, or unpacked into `buffer`.
const void* codes_of(const QuantFormat& format, const Piece& piece, const void* codes, Isa isa, Bytes* buffer) {
    const Bytes* from = static_cast<const Bytes*>(codes) + piece.code;
    if (format.bits() == 8) return from;
    if (format.bits() == 4)
        unpack[isa](from, piece.count, packing_size(piece), buffer);
    else
        unpack_bits[isa](from, piece.count, piece.group_size, format.bits(), buffer);
    return buffer;
}

/// Returns the scales of a piece: in place, or computed from their bytes.
const float* scales_of(const QuantFormat& format, const Piece& piece, const void* scales, float* buffer) {
    const size_t group = format.first_group + piece.group;
    if (format.has_floats()) return static_cast<const float*>(scales) + group;
    const auto* bytes = static_cast<const Bytes*>(scales);
    const size_t groups = (piece.count + piece.group_size - 1) / piece.group_size;
    if (info(format.codes).has(spikes)) {
        for (size_t g = 0; g < groups; ++g)
            std::memcpy(buffer + g, bytes + (group + g) * spiked_scale_bytes, sizeof(float));
        return buffer;
    }
    float tensor = 0;
    if (info(format.codes).scale == ScaleKind::e4m3) {
        std::memcpy(&tensor, bytes, sizeof tensor);
        bytes += sizeof tensor;
    }
    scales_from_bytes(format.codes, bytes + group, groups, tensor, buffer);
    return buffer;
}

/// Computes the values of a piece of a format that is rotated or has spikes.
void shaped_values(const QuantFormat& format, const Add& add, const Piece& piece, const void* codes, const void* scales,
                   Isa isa, float* out) {
    alignas(64) Bytes unpacked[block];
    alignas(64) float found[block];
    const Term term{codes_of(format, piece, codes, isa, unpacked), scales_of(format, piece, scales, found)};
    add.start(term, {nullptr, nullptr}, piece.count, piece.group_size, out);
    if (info(format.codes).has(rotated)) turn_back(term.scales, piece.count, piece.group_size, out, isa);
    if (!info(format.codes).has(spikes)) return;
    const size_t group = format.first_group + piece.group;
    put_spikes(static_cast<const Bytes*>(scales) + group * spiked_scale_bytes + sizeof(float), piece.count,
               piece.group_size, out);
}

}  // namespace

void dequantize_sum(const QuantFormat& format, const void* const* codes, const void* const* scales, size_t n_sources,
                    size_t count, bool average, float* sum, Isa isa) {
    format.check();
    check_sources(n_sources);
    const Add add = add_of(format.codes, isa);
    each_piece(format, count, [=](const Piece& piece) {
        alignas(64) Bytes unpacked_a[block];
        alignas(64) Bytes unpacked_b[block];
        float found_a[most_groups];
        float found_b[most_groups];
        float* to = sum + piece.first;
        const bool shaped = info(format.codes).shaped();
        for (size_t s = 0; shaped && s < n_sources; ++s) {
            alignas(64) float values[block];
            shaped_values(format, add, piece, codes[s], scales[s], isa, s == 0 ? to : values);
            if (s > 0) accumulate[isa](values, piece.count, to);
        }
        for (size_t s = 0; !shaped && s < n_sources; s += 2) {
            const Term a{codes_of(format, piece, codes[s], isa, unpacked_a),
                         scales_of(format, piece, scales[s], found_a)};
            Term b{nullptr, nullptr};
            if (s + 1 < n_sources) {
                b = {codes_of(format, piece, codes[s + 1], isa, unpacked_b),
                     scales_of(format, piece, scales[s + 1], found_b)};
            }
            (s == 0 ? add.start : add.resume)(a, b, piece.count, piece.group_size, to);
        }
        if (average) divide[isa](to, piece.count, static_cast<float>(n_sources));
    });
}

bool dequantize(const QuantFormat& format, DType dtype, const void* codes, const void* scales, size_t count,
                Overflow overflow, void* out, bool streams, Isa isa) {
    format.check();
    check_float(dtype);
    const Add add = add_of(format.codes, isa);
    const bool rounds = dtype != DType::float32;
    // Groups must begin where vectors are aligned.
    streams = streams && !rounds && !info(format.codes).shaped() && reinterpret_cast<uintptr_t>(out) % 32 == 0 &&
              format.group_size % 8 == 0;
    bool fits = true;
    each_piece(format, count, [=, &fits](const Piece& piece) {
        alignas(64) Bytes unpacked[block];
        alignas(64) float values[block];
        float found[most_groups];
        void* direct = static_cast<Bytes*>(out) + piece.first * size_of(dtype);
        if (info(format.codes).shaped()) {
            shaped_values(format, add, piece, codes, scales, isa, values);
            fits &= cast(dtype, overflow, values, piece.count, direct, isa);
            return;
        }
        const Term term{codes_of(format, piece, codes, isa, unpacked), scales_of(format, piece, scales, found)};
        (streams ? add.stream : add.start)(term, {nullptr, nullptr}, piece.count, piece.group_size,
                                           rounds ? values : direct);
        if (rounds) fits &= cast(dtype, overflow, values, piece.count, direct, isa);
    });
    if (streams) fence_streamed();
    return fits;
}

bool cast(DType dtype, Overflow overflow, const float* in, size_t count, void* out, Isa isa) {
    check_float(dtype);
    if (count == 0) return true;
    if (dtype == DType::float32) {
        if (in != out) std::memcpy(out, in, count * sizeof(float));
        return true;
    }
    const HalfBlocks half = half_blocks(dtype, isa);
    alignas(64) float limited[block];
    bool fits = true;
    for (size_t first = 0; first < count; first += block) {
        const size_t n = std::min(block, count - first);
        const float* from = in + first;
        if (overflow != Overflow::infinity) {
            bool exceeded = false;
            limit[isa](from, n, limit_of(dtype), limited, &exceeded);
            fits &= !exceeded;
            from = limited;
        }
        half.narrow(static_cast<Bytes*>(out) + first * size_of(dtype), reinterpret_cast<const Bytes*>(from), n);
    }
    return fits || overflow != Overflow::raise;
}

}  // namespace alltoallv::kernel
