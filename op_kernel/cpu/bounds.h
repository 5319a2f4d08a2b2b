// Bounds on what a sum of codes can be wrong by, one per group. docs/quantization.md has the definition.
#pragma once

#include <cstddef>
#include <vector>

#include "op_kernel/cpu/quantize.h"

namespace alltoallv::kernel {

/// What a code can be wrong by, in units of its group's scale, for every pattern of the format's bits: half the widest
/// gap beside the code, the reach of what saturates, and the float32 arithmetic of a sum over `ranks`. Rounded up.
std::vector<float> code_errors(CodeFormat format, size_t ranks);

/// The same for the elements of a rotated group, whose errors the rotation mixes: the 2-norm of a block's errors, and
/// the arithmetic of two rotations. By the binary logarithm of the group's largest block.
std::vector<float> turned_errors(CodeFormat format, size_t ranks);

/// For scales that are bytes: the scale by which errors count, for every byte; times the tensor's scale in NVFP4.
std::vector<float> scale_errors(CodeFormat format);

/// The codes of one vector.
struct CodedSource {
    const void* codes;
    const void* scales;
};

/// Computes bounds of sums as dequantize_sum() and cast() compute them.
class Bounds {
  public:
    /// `requantizes`: the sum travels as codes again. `out_dtype` and `overflow` are of the result.
    Bounds(CodeFormat format, size_t ranks, bool average, bool requantizes, DType out_dtype, Overflow overflow);

    /// Computes a bound for every group of `count` elements. `sources`: of the ranks, then of their sum, if it travels
    /// as codes. `values`: what is rounded to the output's type; null: the values of the last source.
    void find(const QuantFormat& format, const CodedSource* sources, size_t count, const float* values,
              float* bounds) const;

  private:
    float scale_of(const QuantFormat& format, const CodedSource& source, size_t group) const;
    float largest_error(const QuantFormat& format, const CodedSource* sources, size_t group, size_t count) const;
    float error_of_group(const QuantFormat& format, const CodedSource& source, size_t group, size_t count) const;
    float error_of_spike(uint16_t value) const;
    uint32_t largest_value(const QuantFormat& format, const CodedSource& source, size_t group, size_t count) const;
    float rounding(float magnitude) const;

    size_t ranks_, sources_;
    bool average_;
    DType out_dtype_;
    Overflow overflow_;
    std::vector<float> codes_, turned_, scales_;
    float slack_, least_;
};

}  // namespace alltoallv::kernel
