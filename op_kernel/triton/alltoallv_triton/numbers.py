"""Float32 by its bits: magnitudes, scales, codes, and rounding to the output's dtype."""

from __future__ import annotations

import triton
import triton.language as tl

SIGN_CLEAR = tl.constexpr(0x7FFFFFFF)
INF = tl.constexpr(0x7F800000)
BELOW_INF = tl.constexpr(0x7F7FFFFF)
NAN = tl.constexpr(0x7FC00000)  # the one NaN that results hold
LEAST_NORMAL = tl.constexpr(0x00800000)
LEAST_SCALE = tl.constexpr(2.0**-125)
# At 1.5 * 2**23 the last place of a float32 is 1: adding it rounds to an integer, half to even.
ROUNDER = tl.constexpr(12582912.0)
ROUNDER_BITS = tl.constexpr(0x4B400000)

SATURATE = tl.constexpr(0)
RAISE = tl.constexpr(1)
INFINITY = tl.constexpr(2)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def magnitude_of(x):
    """The bits without sign: in the order of values, inf above them, NaN above inf."""
    return x.to(tl.int32, bitcast=True) & SIGN_CLEAR


@triton.jit
def one_nan(x):
    """Every NaN becomes the positive quiet one without payload."""
    return tl.where(magnitude_of(x) > INF, NAN, bits_of(x)).to(tl.float32, bitcast=True)


@triton.jit
def round_code(x):
    """Half to even, for |x| < 2**22; int32."""
    return bits_of(x + ROUNDER) - ROUNDER_BITS


@triton.jit
def scale_of(largest, BITS: tl.constexpr):
    """Scale and inverse of groups whose largest magnitude has these bits; the inverse is 0 where codes are."""
    most: tl.constexpr = 127.0 if BITS == 8 else 7.0
    largest_scale: tl.constexpr = 0x1020406 * 2.0**97 if BITS == 8 else 0x1249248 * 2.0**101
    usual = (largest >= LEAST_NORMAL) & (largest < INF)
    a = tl.where(usual, largest, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(a, tl.full(a.shape, most, tl.float32))
    scale = tl.minimum(tl.maximum(scale, LEAST_SCALE), largest_scale)
    inverse = tl.div_rn(tl.full(a.shape, 1.0, tl.float32), scale)
    special = tl.where(largest < INF, 0, tl.where(largest > INF, NAN, INF))
    scale = tl.where(usual, bits_of(scale), special).to(tl.float32, bitcast=True)
    return scale, tl.where(usual, inverse, 0.0)


@triton.jit
def codes_of(x, largest, inverse, BITS: tl.constexpr):
    """Codes of x, int32; ``largest`` and ``inverse`` are those of its groups, broadcast to it."""
    most: tl.constexpr = 127 if BITS == 8 else 7
    codes = round_code(x * inverse)
    extreme = tl.where(magnitude_of(x) == INF, tl.where(bits_of(x) < 0, -most, most), 0)
    return tl.where(largest < INF, codes, tl.where(largest == INF, extreme, 0))


@triton.jit
def saturated_code(x):
    """Half to even, at most 127 in magnitude; NaN becomes 0. int32."""
    magnitude = magnitude_of(x)
    limited = tl.minimum(tl.where(magnitude > INF, 0, magnitude), 0x42FE0000)  # 127.0
    code = round_code(limited.to(tl.float32, bitcast=True))
    return tl.where(bits_of(x) < 0, -code, code)


@triton.jit
def narrowed(x, limit, DTYPE: tl.constexpr, OVERFLOW: tl.constexpr):
    """Float32 as the bits of DTYPE, rounded half to even, and where a value did not fit.

    Args:
        x: float32.
        limit: bits of float32: magnitudes up to here can fail to fit, those above are meant.
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
