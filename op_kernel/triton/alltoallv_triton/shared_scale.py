"""Sums int8 values that share a scale, exactly in int32, and computes codes for given scales.

Elements lie in rows of ``channels``; each channel has a scale, and a tile is ROWS rows of WIDTH channels. With UNIFORM
there is one scale, all elements are one row, and a tile is flat. Sources lie ``stride`` elements apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alltoallv_triton.dequantize import note_overflow
from alltoallv_triton.numbers import INF, RAISE, canonical_nan, magnitude_of, narrowed, saturated_code
from alltoallv_triton.tiles import pieces_of


@triton.jit
def load_scales(scales, column, left, WIDTH: tl.constexpr, UNIFORM: tl.constexpr):
    """Loads one scale, or [1, WIDTH]."""
    if UNIFORM:
        return tl.load(scales)
    else:
        columns = tl.arange(0, WIDTH)
        return tl.load(scales + column + columns, mask=columns < left, other=1.0)[None, :]


@triton.jit
def load_inverses(scales, column, left, WIDTH: tl.constexpr, UNIFORM: tl.constexpr):
    """Returns 1 / scale in the shape of `load_scales`."""
    if UNIFORM:
        # Divides a vector: triton-ascend has no exact division of a scalar.
        lanes = tl.arange(0, 8)
        inverses = tl.div_rn(tl.full([8], 1.0, tl.float32), tl.load(scales + lanes, mask=lanes < 1, other=1.0))
        return tl.sum(tl.where(lanes < 1, inverses, 0.0), axis=0)
    else:
        return tl.div_rn(tl.full([1, WIDTH], 1.0, tl.float32), load_scales(scales, column, left, WIDTH, UNIFORM))


@triton.jit
def tile_of(tile, rows, channels, ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIFORM: tl.constexpr):
    """Returns the first row and channel of a tile, the offsets of its elements from the first one, and their mask."""
    if UNIFORM:
        column = tile * WIDTH
        flat = tl.arange(0, WIDTH)
        return tl.cast(0, tl.int32), column, flat, flat < channels - column
    else:
        across = pieces_of(channels, WIDTH)
        row = tile // across * ROWS
        column = tile % across * WIDTH
        down = tl.arange(0, ROWS)[:, None]
        right = tl.arange(0, WIDTH)[None, :]
        return row, column, down * channels + right, (down < rows - row) & (right < channels - column)


@triton.jit
def load_integers(inputs, at, mask, sources, stride):
    """Returns the exact sum of the sources as float32."""
    total = tl.load(inputs + at, mask=mask, other=0).to(tl.int32)
    for _ in range(1, sources):
        inputs += stride
        total += tl.load(inputs + at, mask=mask, other=0).to(tl.int32)
    return total.to(tl.float32)


@triton.jit
def sum_shared_scale(
    inputs, sources, stride, scales, offset, out, overflow_flag, rows, channels,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIFORM: tl.constexpr, DTYPE: tl.constexpr, OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Computes (sum + sources * offset) * scale, rounded to DTYPE. ``out`` points to integers of DTYPE's size."""
    offsets = tl.load(offset) * sources
    for tile in range(tl.program_id(0), pieces_of(rows, ROWS) * pieces_of(channels, WIDTH), tl.num_programs(0)):
        row, column, at, mask = tile_of(tile, rows, channels, ROWS, WIDTH, UNIFORM)
        first = tl.cast(row, tl.int64) * channels + column
        total = load_integers(inputs + first, at, mask, sources, stride)
        scale = load_scales(scales, column, channels - column, WIDTH, UNIFORM)
        values = canonical_nan((total + offsets) * scale)
        finite = magnitude_of(scale) < INF
        limit = tl.where(finite & (magnitude_of(offsets) < INF), INF, 0)
        result, exceeded = narrowed(values, limit, DTYPE, OVERFLOW)
        tl.store(out + first + at, result, mask=mask)
        if OVERFLOW == RAISE:
            note_overflow(overflow_flag, tl.max(tl.where(mask & exceeded, 1, 0)))


@triton.jit
def quantize_scaled(
    x, scales, codes, rows, channels, ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIFORM: tl.constexpr
):  # fmt: skip
    """Writes the codes of x * (1 / scale), rounded half to even, at most 127 in magnitude."""
    for tile in range(tl.program_id(0), pieces_of(rows, ROWS) * pieces_of(channels, WIDTH), tl.num_programs(0)):
        row, column, at, mask = tile_of(tile, rows, channels, ROWS, WIDTH, UNIFORM)
        first = tl.cast(row, tl.int64) * channels + column
        inverse = load_inverses(scales, column, channels - column, WIDTH, UNIFORM)
        values = tl.load(x + first + at, mask=mask, other=0).to(tl.float32) * inverse
        tl.store(codes + first + at, saturated_code(values).to(tl.int8), mask=mask)


@triton.jit
def requantize_sum(
    inputs, sources, stride, ratios, codes, rows, channels,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIFORM: tl.constexpr,
):  # fmt: skip
    """Writes the codes of sum * ratio, half to even, at most 127 in magnitude, to convert between two shared scales."""
    for tile in range(tl.program_id(0), pieces_of(rows, ROWS) * pieces_of(channels, WIDTH), tl.num_programs(0)):
        row, column, at, mask = tile_of(tile, rows, channels, ROWS, WIDTH, UNIFORM)
        first = tl.cast(row, tl.int64) * channels + column
        total = load_integers(inputs + first, at, mask, sources, stride)
        ratio = load_scales(ratios, column, channels - column, WIDTH, UNIFORM)
        tl.store(codes + first + at, saturated_code(total * ratio).to(tl.int8), mask=mask)
