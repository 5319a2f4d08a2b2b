"""Computes with float32 by its bits: magnitudes, scales, codes, and rounding to the output's dtype."""

from __future__ import annotations

import triton
import triton.language as tl

SIGN_CLEAR = tl.constexpr(0x7FFFFFFF)
INF = tl.constexpr(0x7F800000)
BELOW_INF = tl.constexpr(0x7F7FFFFF)
NAN = tl.constexpr(0x7FC00000)  # the only NaN in results
LEAST_NORMAL = tl.constexpr(0x00800000)
LEAST_SCALE = tl.constexpr(2.0**-125)
# At 1.5 * 2**23 the last place of a float32 is 1: adding it rounds to an integer, half to even.
ROUNDER = tl.constexpr(12582912.0)
ROUNDER_BITS = tl.constexpr(0x4B400000)

# The first rows of the table of formats, `alltoallv._core.code_formats`, by index. Up to FP8_E5M2 scales are float32;
# from MXFP4 on codes have 4 bits. With 8 more, a power of two is rounded up.
INT8 = tl.constexpr(0)
INT4 = tl.constexpr(1)
FP8_E4M3 = tl.constexpr(2)
FP8_E5M2 = tl.constexpr(3)
MXFP8 = tl.constexpr(4)
MXFP8_E5M2 = tl.constexpr(5)
MXFP4 = tl.constexpr(6)
NVFP4 = tl.constexpr(7)
ROUNDS_UP = 8

SATURATE = tl.constexpr(0)
RAISE = tl.constexpr(1)
INFINITY = tl.constexpr(2)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def magnitude_of(x):
    """Returns the bits without the sign. They are ordered like the values, with inf above them and NaN above inf."""
    return x.to(tl.int32, bitcast=True) & SIGN_CLEAR


@triton.jit
def canonical_nan(x):
    """Makes every NaN the positive quiet NaN without payload."""
    return tl.where(magnitude_of(x) > INF, NAN, bits_of(x)).to(tl.float32, bitcast=True)


@triton.jit
def round_code(x):
    """Rounds half to even, for |x| < 2**22; int32."""
    return bits_of(x + ROUNDER) - ROUNDER_BITS


@triton.jit
def scale_of(largest, FORMAT: tl.constexpr):
    """Returns scale and inverse of groups by the bits of their largest magnitude; inverse 0 makes all codes 0."""
    if FORMAT == INT8:
        most: tl.constexpr = 127.0
        largest_scale: tl.constexpr = 0x1020406 * 2.0**97
    elif FORMAT == INT4:
        most: tl.constexpr = 7.0
        largest_scale: tl.constexpr = 0x1249248 * 2.0**101
    elif FORMAT == FP8_E4M3:
        most: tl.constexpr = 448.0
        largest_scale: tl.constexpr = 0x1249248 * 2.0**95
    else:
        most: tl.constexpr = 57344.0
        largest_scale: tl.constexpr = 0x1249248 * 2.0**88
    usual = (largest >= LEAST_NORMAL) & (largest < INF)
    a = tl.where(usual, largest, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(a, tl.full(a.shape, most, tl.float32))
    scale = tl.minimum(tl.maximum(scale, LEAST_SCALE), largest_scale)
    inverse = tl.div_rn(tl.full(a.shape, 1.0, tl.float32), scale)
    special = tl.where(largest < INF, 0, tl.where(largest > INF, NAN, INF))
    scale = tl.where(usual, bits_of(scale), special).to(tl.float32, bitcast=True)
    return scale, tl.where(usual, inverse, 0.0)


@triton.jit
def byte_of(largest, tensor, FORMAT: tl.constexpr):
    """Returns the byte that encodes the scale, int32, and the inverse. ``tensor`` is NVFP4's scale of all groups."""
    finite = largest < INF
    if FORMAT == NVFP4:
        a = tl.where(finite & (largest >= LEAST_NORMAL), largest, 0).to(tl.float32, bitcast=True)
        wanted = tl.div_rn(tl.div_rn(a, tl.full(a.shape, 6.0, tl.float32)), tl.zeros(a.shape, tl.float32) + tensor)
        byte = tl.where(finite, small_code(wanted, FP8_E4M3), 0x7F)
        usual = finite & (byte > 0)
        scale = tl.where(usual, small_value(byte, FP8_E4M3) * tensor, 1.0)
        return byte, tl.where(usual, tl.div_rn(tl.full(a.shape, 1.0, tl.float32), scale), 0.0)
    else:
        kind: tl.constexpr = FORMAT % 8
        exponent: tl.constexpr = 8 if kind == MXFP8 else 15 if kind == MXFP8_E5M2 else 2
        # Carries into the exponent if the fraction is above the largest code's, 1.75 or 1.5.
        up: tl.constexpr = 0 if FORMAT < 8 else 0x3FFFFF if kind == MXFP4 else 0x1FFFFF
        power = tl.minimum(tl.maximum(((largest + up) >> 23) - exponent, 0), 254 - exponent)
        inverse = tl.where(finite, (254 - power) << 23, 0).to(tl.float32, bitcast=True)
        return tl.where(finite, power, 0xFF), inverse


@triton.jit
def scale_of_byte(byte, tensor, FORMAT: tl.constexpr):
    """Returns the scale that a byte encodes."""
    if FORMAT == NVFP4:
        return small_value(byte, FP8_E4M3) * tensor
    else:
        power = byte & 0xFF
        return tl.where(power == 0xFF, NAN, tl.where(power == 0, 1 << 22, power << 23)).to(tl.float32, bitcast=True)


@triton.jit
def small_code(x, FORMAT: tl.constexpr):
    """Rounds float32 to a float of 8 or 4 bits, half to even, saturated; int32."""
    e4m3: tl.constexpr = (FORMAT == FP8_E4M3) or (FORMAT % 8 == MXFP8)
    e5m2: tl.constexpr = (FORMAT == FP8_E5M2) or (FORMAT % 8 == MXFP8_E5M2)
    mantissa: tl.constexpr = 3 if e4m3 else 2 if e5m2 else 1
    bias: tl.constexpr = 7 if e4m3 else 15 if e5m2 else 1
    most: tl.constexpr = 0x43E00000 if e4m3 else 0x47600000 if e5m2 else 0x40C00000
    sign: tl.constexpr = 0x80 if e4m3 or e5m2 else 8
    shift: tl.constexpr = 23 - mantissa
    rebias: tl.constexpr = (127 - bias) << 23
    half: tl.constexpr = (1 << (shift - 1)) - 1
    rounder: tl.constexpr = 2.0 ** (24 - bias - mantissa)  # its last place is the least subnormal
    bits = bits_of(x)
    magnitude = tl.minimum(bits & SIGN_CLEAR, most)
    normal = (magnitude - rebias + half + ((magnitude >> shift) & 1)) >> shift
    counted = bits_of(magnitude.to(tl.float32, bitcast=True) + rounder) & ((1 << 23) - 1)
    code = tl.where(magnitude < rebias + (1 << 23), counted, normal)
    return tl.where(bits < 0, code | sign, code)


@triton.jit
def small_value(code, FORMAT: tl.constexpr):
    """Returns the float32 value of a float of 8 or 4 bits, given in the low bits of int32."""
    e4m3: tl.constexpr = (FORMAT == FP8_E4M3) or (FORMAT % 8 == MXFP8)
    e5m2: tl.constexpr = (FORMAT == FP8_E5M2) or (FORMAT % 8 == MXFP8_E5M2)
    mantissa: tl.constexpr = 3 if e4m3 else 2 if e5m2 else 1
    bias: tl.constexpr = 7 if e4m3 else 15 if e5m2 else 1
    sign: tl.constexpr = 0x80 if e4m3 or e5m2 else 8
    rebias: tl.constexpr = (127 - bias) << 23
    unit: tl.constexpr = 2.0 ** (1 - bias - mantissa)
    magnitude = code & (sign - 1)
    normal = (magnitude << (23 - mantissa)) + rebias
    bits = tl.where(magnitude < (1 << mantissa), bits_of(magnitude.to(tl.float32) * unit), normal)
    if e4m3:
        bits = tl.where(magnitude == 0x7F, NAN, bits)
    if e5m2:
        bits = tl.where(magnitude < 0x7C, bits, tl.where(magnitude == 0x7C, INF, NAN))
    signed = tl.where((code & sign) != 0, bits | ~SIGN_CLEAR, bits)  # older Tritons' -x is 0 - x, which is never -0
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def value_of(code, FORMAT: tl.constexpr):
    """Returns the float32 value of a code."""
    if FORMAT <= INT4:
        return code.to(tl.float32)
    else:
        return small_value(code.to(tl.int32), FORMAT)


@triton.jit
def codes_of(x, largest, inverse, FORMAT: tl.constexpr):
    """Returns the codes of x, int32; ``largest`` and ``inverse`` belong to its groups, broadcast to x."""
    bits = bits_of(x)
    if FORMAT <= INT4:
        most: tl.constexpr = 127 if FORMAT == INT8 else 7
        codes = round_code(x * inverse)
        extreme = tl.where(magnitude_of(x) == INF, tl.where(bits < 0, -most, most), 0)
    else:
        kept = tl.where((bits & SIGN_CLEAR) < LEAST_NORMAL, bits & ~SIGN_CLEAR, bits).to(tl.float32, bitcast=True)
        codes = small_code(kept * inverse, FORMAT)
        if FORMAT <= FP8_E5M2:
            most: tl.constexpr = 0x7E if FORMAT == FP8_E4M3 else 0x7B
            extreme = tl.where(magnitude_of(x) == INF, tl.where(bits < 0, most | 0x80, most), 0)
        else:
            extreme = tl.zeros(codes.shape, tl.int32)
    return tl.where(largest < INF, codes, tl.where(largest == INF, extreme, 0))


@triton.jit
def saturated_code(x):
    """Rounds half to even, at most 127 in magnitude; NaN becomes 0. int32."""
    magnitude = magnitude_of(x)
    limited = tl.minimum(tl.where(magnitude > INF, 0, magnitude), 0x42FE0000)  # 127.0
    code = round_code(limited.to(tl.float32, bitcast=True))
    return tl.where(bits_of(x) < 0, -code, code)


@triton.jit
def narrowed(x, limit, DTYPE: tl.constexpr, OVERFLOW: tl.constexpr):
    """Returns the bits of x rounded to DTYPE, half to even, and a mask of the values that do not fit.

    Args:
        x: float32.
        limit: bits of float32: larger magnitudes are inf or NaN on purpose and count as fitting.
    """
    if DTYPE == tl.float16:
        largest: tl.constexpr = 0x477FE000
        too_large: tl.constexpr = 0x477FF000
    elif DTYPE == tl.bfloat16:
        largest: tl.constexpr = 0x7F7F0000
        too_large: tl.constexpr = 0x7F7F8000
    else:
        largest: tl.constexpr = 0x7F7FFFFF
        too_large: tl.constexpr = 0x7F800000
    bits = bits_of(x)
    magnitude = bits & SIGN_CLEAR
    exceeded = (magnitude >= too_large) & (magnitude <= limit)
    if OVERFLOW != INFINITY:
        bits = tl.where(exceeded, (bits - magnitude) | largest, bits)
    if DTYPE == tl.float16:
        half = bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
        result = tl.where(magnitude > INF, 0x7E00, half.to(tl.int32)).to(tl.int16)
    elif DTYPE == tl.bfloat16:
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = tl.where(magnitude > INF, 0x7FC0, rounded).to(tl.int16)
    else:
        result = tl.where(magnitude > INF, NAN, bits)
    return result, exceeded
