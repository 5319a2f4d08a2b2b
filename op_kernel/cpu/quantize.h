// Quantizes floating-point vectors in groups, and sums them for quantized all-reduces.
//
// docs/quantization.md has the rules. These kernels, the Triton kernels and alltoallv.testing.quantized
// agree bit for bit in codes, scales and sums. Codes, inputs and outputs may have any alignment; scales of
// float32 and `float*` must be aligned. Every kernel takes the instruction set last, at most best_isa(), for
// tests.
#pragma once

#include <cstddef>
#include <cstdint>

#include "op_kernel/cpu/clones.h"
#include "runtime/base/code_format.h"
#include "runtime/base/dtype.h"

namespace alltoallv::kernel {

/// Codes and scales of one vector: the codes of a group are planes of bits, packed_bytes(), each of which begins at a
/// byte and has the lower elements in the low bits; of a long group, planes of 2,048 elements after each other. A scale
/// per `group_size` elements, with its group's spikes behind it. Groups begin at element 0; the last may be shorter.
struct QuantFormat {
    CodeFormat codes = CodeFormat::int8;
    size_t group_size = 128;
    float tensor = 0;        ///< NVFP4: the scale of all groups, tensor_scale(); 0: quantize() computes its input's
    size_t first_group = 0;  ///< index in the record of scales at which the vector begins

    /// Throws Error (invalid_param) unless groups of the format can have this size.
    void check() const;
    int bits() const { return info(codes).bits; }
    bool has_floats() const { return info(codes).has_floats(); }
    size_t groups(size_t count) const { return count / group_size + (count % group_size != 0); }
    size_t scale_bytes(size_t count) const { return info(codes).scale_bytes(groups(count)); }
    size_t code_bytes(size_t count) const { return info(codes).code_bytes(count, group_size); }
};

/// Quantizes `count` elements of float32, float16 or bfloat16. `error`, if not null, holds float32 values that are
/// added to the input first and replaced by what the rounding lost (error feedback).
void quantize(const QuantFormat& format, DType dtype, const void* input, size_t count, void* codes, void* scales,
              float* error, Isa isa = best_isa());

/// Does quantize() in two steps, for a group that is never in one place: the largest magnitude of its pieces gives its
/// scale, by which pieces are encoded. Magnitudes are the bits of a float32 without sign.
uint32_t largest_magnitude(DType dtype, const void* input, size_t count, const float* error, Isa isa = best_isa());
float scale_of(CodeFormat codes, uint32_t magnitude);
void encode_group(CodeFormat format, DType dtype, const void* input, size_t count, float scale, void* codes,
                  const float* error_in, float* error_out, Isa isa = best_isa());

/// Returns NVFP4's scale of a vector by its largest magnitude in finite groups; or of a sum of vectors with scales.
float tensor_scale(uint32_t magnitude);
float limited_tensor_scale(float sum);
/// Returns that magnitude.
uint32_t largest_of_finite_groups(size_t group_size, DType dtype, const void* input, size_t count, const float* error,
                                  Isa isa = best_isa());

/// Computes out[k] = code * scale in float32, then cast() to `dtype` (float32, float16, bfloat16). With `streams`,
/// float32 goes past the caches if possible, and a store fence follows. Returns false if a value did not fit and
/// `overflow` is raise.
bool dequantize(const QuantFormat& format, DType dtype, const void* codes, const void* scales, size_t count,
                Overflow overflow, void* out, bool streams = false, Isa isa = best_isa());

/// Computes sum[k] = code_0*scale_0 + code_1*scale_1 + ... in float32, in the order of the sources; `average` divides
/// it by their number.
void dequantize_sum(const QuantFormat& format, const void* const* codes, const void* const* scales, size_t n_sources,
                    size_t count, bool average, float* sum, Isa isa = best_isa());

/// Rounds float32 to `dtype` (float32, float16, bfloat16), half to even; inf and NaN stay. Returns false if a finite
/// value did not fit and `overflow` is raise.
bool cast(DType dtype, Overflow overflow, const float* in, size_t count, void* out, Isa isa = best_isa());

/// One value for all elements, or one per channel: the last axis of the vector, whose element `first` comes first.
struct Scales {
    const float* values;
    size_t size;  // 1, or the number of channels
    size_t first = 0;
};

/// Shared scale: out[k] = (sum of the int8 inputs + n_sources * offset) * scale. The sum is exact; sum and offset are
/// added in float32, multiplied in float32, and rounded to `dtype` (float32, float16, bfloat16), half to even. Finite
/// scales and offsets never give inf, unless overflow is infinity. Returns false if a value did not fit and `overflow`
/// is raise.
bool sum_shared_scale(DType dtype, const void* const* inputs, size_t n_sources, size_t count, const Scales& scales,
                      float offset, Overflow overflow, void* out, Isa isa = best_isa());

/// Computes codes[k] = input * (1 / scale) by a given scale: half to even, saturated to +-127; NaN becomes 0.
void quantize_scaled(DType dtype, const void* input, size_t count, const Scales& scales, void* codes,
                     Isa isa = best_isa());

/// Computes codes[k] = (sum of int8 inputs) * ratio, half to even, saturated to +-127: between two shared scales.
void requantize_sum(const void* const* inputs, size_t n_sources, size_t count, const Scales& ratios, void* codes,
                    Isa isa = best_isa());

}  // namespace alltoallv::kernel
