"""Sums of dequantized sources, in their order: rounded to the output's dtype, or quantized again.

A source is a record of codes and scales; the next one lies ``code_stride`` and ``scale_stride`` behind it. One pass
over memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alltoallv.triton_kernels.numbers import BELOW_INF, RAISE, narrowed, one_nan
from alltoallv.triton_kernels.quantize import store_quantized
from alltoallv.triton_kernels.tiles import load_codes, load_tile, store_tile


@triton.jit
def load_term(
    codes, scales, rows_left, left,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Code times scale of ``left`` elements in ``rows_left`` groups."""
    rows = tl.arange(0, ROWS)
    scale = tl.load(scales + rows, mask=rows < rows_left, other=0.0)
    return load_codes(codes, left, GROUP, ROWS, WIDTH, BITS) * scale[:, None]


@triton.jit
def load_sum(
    codes, scales, sources, code_stride, scale_stride, rows_left, left,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, AVERAGE: tl.constexpr,
):  # fmt: skip
    """The terms of all sources, added in float32 in the order of the sources."""
    total = load_term(codes, scales, rows_left, left, GROUP, ROWS, WIDTH, BITS)
    for _ in range(1, sources):
        codes += code_stride
        scales += scale_stride
        total += load_term(codes, scales, rows_left, left, GROUP, ROWS, WIDTH, BITS)
    if AVERAGE:
        total = tl.div_rn(total, tl.zeros([ROWS, WIDTH], tl.float32) + sources)
    return one_nan(total)


@triton.jit
def store_narrowed(
    out, values, limit, left, misfits,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr, OVERFLOW: tl.constexpr,
):  # fmt: skip
    """``out`` points to integers of DTYPE's size; ``misfits`` becomes 1 if a value did not fit and that matters."""
    result, exceeded = narrowed(values, limit, DTYPE, OVERFLOW)
    store_tile(out, result, left, STRIDE, ROWS, WIDTH)
    if OVERFLOW == RAISE:
        any_misfit = tl.max(tl.max(exceeded.to(tl.int32), axis=1), axis=0)
        tl.store(misfits, 1, mask=any_misfit > 0)


@triton.jit
def dequantize_groups(
    codes, scales, out, misfits, count, part, part_code_stride, part_scale_stride,
    sources, code_stride, scale_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, AVERAGE: tl.constexpr,
    DTYPE: tl.constexpr, OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Groups that fit a tile. ``count`` elements of the output in parts, whose records lie one behind the other."""
    span: tl.constexpr = ROWS * GROUP
    span_bytes: tl.constexpr = ROWS * (GROUP if BITS == 8 else (GROUP + 1) // 2)
    tiles = tl.cdiv(part, span)
    for tile in range(tl.program_id(0), tiles * tl.cdiv(count, part), tl.num_programs(0)):
        record = tl.cast(tile // tiles, tl.int64)
        within = tl.cast(tile % tiles, tl.int64)
        first = record * part + within * span
        left = tl.minimum(tl.minimum(count - first, part - within * span), span).to(tl.int32)
        values = load_sum(
            codes + (record * part_code_stride + within * span_bytes),
            scales + (record * part_scale_stride + within * ROWS),
            sources, code_stride, scale_stride, tl.cdiv(left, GROUP), left, GROUP, ROWS, WIDTH, BITS, AVERAGE,
        )  # fmt: skip
        store_narrowed(out + first, values, BELOW_INF, left, misfits, GROUP, ROWS, WIDTH, DTYPE, OVERFLOW)


@triton.jit
def dequantize_long_groups(
    codes, scales, out, misfits, count, part, group, part_code_stride, part_scale_stride,
    sources, code_stride, scale_stride,
    WIDTH: tl.constexpr, BITS: tl.constexpr, AVERAGE: tl.constexpr, DTYPE: tl.constexpr, OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Groups longer than a tile: every tile is a piece of one group."""
    pieces = tl.cdiv(group, WIDTH)
    tiles = tl.cdiv(part, group) * pieces
    group_bytes = group if BITS == 8 else (group + 1) // 2
    for tile in range(tl.program_id(0), tiles * tl.cdiv(count, part), tl.num_programs(0)):
        record = tl.cast(tile // tiles, tl.int64)
        of_record = tile % tiles
        within = tl.cast(of_record // pieces, tl.int64)
        begin = tl.cast(of_record % pieces, tl.int64) * WIDTH
        first = record * part + within * group
        left = tl.minimum(tl.minimum(count - first, part - within * group), group) - begin
        left = tl.maximum(tl.minimum(left, WIDTH), 0).to(tl.int32)
        at = record * part_code_stride + within * group_bytes + (begin if BITS == 8 else begin // 2)
        values = load_sum(
            codes + at, scales + (record * part_scale_stride + within),
            sources, code_stride, scale_stride, 1, left, WIDTH, 1, WIDTH, BITS, AVERAGE,
        )  # fmt: skip
        store_narrowed(out + (first + begin), values, BELOW_INF, left, misfits, WIDTH, 1, WIDTH, DTYPE, OVERFLOW)


@triton.jit
def requantize_groups(
    codes, scales, sources, code_stride, scale_stride, error, new_codes, new_scales, count,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, AVERAGE: tl.constexpr,
    FEEDBACK: tl.constexpr,
):  # fmt: skip
    """The sum of the sources of one part, quantized in the same groups, which fit a tile."""
    span: tl.constexpr = ROWS * GROUP
    span_bytes: tl.constexpr = ROWS * (GROUP if BITS == 8 else (GROUP + 1) // 2)
    for tile in range(tl.program_id(0), tl.cdiv(count, span), tl.num_programs(0)):
        at = tl.cast(tile, tl.int64)
        first = at * span
        left = tl.minimum(count - first, span).to(tl.int32)
        values = load_sum(
            codes + at * span_bytes, scales + at * ROWS,
            sources, code_stride, scale_stride, tl.cdiv(left, GROUP), left, GROUP, ROWS, WIDTH, BITS, AVERAGE,
        )  # fmt: skip
        if FEEDBACK:
            values += load_tile(error + first, left, GROUP, ROWS, WIDTH)
        store_quantized(
            values, left, new_codes + at * span_bytes, new_scales + at * ROWS, error + first,
            GROUP, ROWS, WIDTH, BITS, FEEDBACK,
        )  # fmt: skip
