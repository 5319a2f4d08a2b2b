"""Sums dequantized sources in their order, and rounds the sum to the output's dtype or quantizes it again.

A source is a record of codes and scales; the next source lies ``code_stride`` and ``scale_stride`` after it. The
kernels read and write memory once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alltoallv_triton.numbers import BELOW_INF, FP8_E5M2, RAISE, canonical_nan, narrowed, scale_of_byte, value_of
from alltoallv_triton.quantize import store_quantized, store_quantized_pairs, tensor_of
from alltoallv_triton.tiles import (
    code_bytes,
    halves,
    joined,
    load_flat,
    load_tile,
    only_elements,
    pieces_of,
    store_flat,
    store_tile,
    unpacked,
)


@triton.jit
def load_scales(scales, tensor, rows_left, ROWS: tl.constexpr, FORMAT: tl.constexpr):
    """Loads the scales of the groups of a tile; [ROWS, 1]."""
    rows = tl.arange(0, ROWS)
    loaded = tl.load(scales + rows, mask=rows < rows_left, other=0)
    if FORMAT <= FP8_E5M2:
        return loaded[:, None]
    else:
        return scale_of_byte(loaded.to(tl.int32), tensor, FORMAT)[:, None]


@triton.jit
def load_sum(
    codes, scales, tensors, sources, code_stride, scale_stride, rows_left, left,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, AVERAGE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Adds code times scale of ``left`` elements in ``rows_left`` groups, in float32, in the order of the sources."""
    tensor = tensor_of(tensors, 0, scale_stride, FORMAT)
    scale = load_scales(scales, tensor, rows_left, ROWS, FORMAT)
    total = value_of(load_tile(codes, left, GROUP, ROWS, WIDTH), FORMAT) * scale
    for source in range(1, sources):
        codes += code_stride
        scales += scale_stride
        tensor = tensor_of(tensors, source, scale_stride, FORMAT)
        scale = load_scales(scales, tensor, rows_left, ROWS, FORMAT)
        total += value_of(load_tile(codes, left, GROUP, ROWS, WIDTH), FORMAT) * scale
    return mean_or_sum(total, sources, AVERAGE)


@triton.jit
def load_sum_of_pairs(
    codes, scales, tensors, sources, code_stride, scale_stride, rows_left, left,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, AVERAGE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Adds 4-bit codes times scales like `load_sum`; returns the sums of the even and of the odd elements."""
    size = code_bytes(left, GROUP, 4)
    low, high = unpacked(load_tile(codes, size, (GROUP + 1) // 2, ROWS, WIDTH // 2), FORMAT)
    scale = load_scales(scales, tensor_of(tensors, 0, scale_stride, FORMAT), rows_left, ROWS, FORMAT)
    even = low * scale
    odd = high * scale
    for source in range(1, sources):
        codes += code_stride
        scales += scale_stride
        low, high = unpacked(load_tile(codes, size, (GROUP + 1) // 2, ROWS, WIDTH // 2), FORMAT)
        scale = load_scales(scales, tensor_of(tensors, source, scale_stride, FORMAT), rows_left, ROWS, FORMAT)
        even += low * scale
        odd += high * scale
    return mean_or_sum(even, sources, AVERAGE), mean_or_sum(odd, sources, AVERAGE)


@triton.jit
def mean_or_sum(total, sources, AVERAGE: tl.constexpr):
    if AVERAGE:
        total = tl.div_rn(total, tl.zeros(total.shape, tl.float32) + sources)
    return canonical_nan(total)


@triton.jit
def note_overflow(overflow_flag, found):
    """Sets ``overflow_flag`` to 1 if any value in ``found`` does not fit."""
    if found > 0:
        tl.store(overflow_flag, 1)


@triton.jit
def dequantize_groups(
    codes, scales, tensors, out, overflow_flag, count, part, part_code_stride, part_scale_stride,
    sources, code_stride, scale_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, FORMAT: tl.constexpr,
    AVERAGE: tl.constexpr, DTYPE: tl.constexpr, OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Dequantizes groups that fit a tile. The output has ``count`` elements in parts; their records lie in sequence."""
    span: tl.constexpr = ROWS * GROUP
    span_bytes: tl.constexpr = ROWS * (GROUP if BITS == 8 else (GROUP + 1) // 2)
    tiles = pieces_of(part, span)
    for tile in range(tl.program_id(0), tiles * pieces_of(count, part), tl.num_programs(0)):
        record = tl.cast(tile // tiles, tl.int64)
        within = tl.cast(tile % tiles, tl.int64)
        first = record * part + within * span
        left = tl.minimum(tl.minimum(count - first, part - within * span), span).to(tl.int32)
        its_codes = codes + (record * part_code_stride + within * span_bytes)
        its_scales = scales + (record * part_scale_stride + within * ROWS)
        its_tensors = tensors + record * (part_scale_stride // 4)
        rows_left = tl.cdiv(left, GROUP)
        if BITS == 8:
            values = load_sum(
                its_codes, its_scales, its_tensors, sources, code_stride, scale_stride, rows_left, left,
                GROUP, ROWS, WIDTH, AVERAGE, FORMAT,
            )  # fmt: skip
            result, exceeded = narrowed(values, BELOW_INF, DTYPE, OVERFLOW)
        else:
            even, odd = load_sum_of_pairs(
                its_codes, its_scales, its_tensors, sources, code_stride, scale_stride, rows_left, left,
                GROUP, ROWS, WIDTH, AVERAGE, FORMAT,
            )  # fmt: skip
            low, low_exceeded = narrowed(even, BELOW_INF, DTYPE, OVERFLOW)
            high, high_exceeded = narrowed(odd, BELOW_INF, DTYPE, OVERFLOW)
            result = joined(low, high, ROWS, WIDTH)
            exceeded = low_exceeded | high_exceeded
        store_tile(out + first, result, left, GROUP, ROWS, WIDTH)
        if OVERFLOW == RAISE:
            note_overflow(overflow_flag, tl.max(tl.max(exceeded.to(tl.int32), axis=1), axis=0))


@triton.jit
def dequantize_pieces(
    codes, scales, out, overflow_flag, count, part, group, part_code_stride, part_scale_stride,
    sources, code_stride, scale_stride,
    WIDTH: tl.constexpr, BITS: tl.constexpr, FORMAT: tl.constexpr, AVERAGE: tl.constexpr, DTYPE: tl.constexpr,
    OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Dequantizes groups of any size up to ``part``; a tile is a piece of one group."""
    pieces = pieces_of(group, WIDTH)
    tiles = pieces_of(part, group) * pieces
    group_bytes = group if BITS == 8 else (group + 1) // 2
    for tile in range(tl.program_id(0), tiles * pieces_of(count, part), tl.num_programs(0)):
        record = tl.cast(tile // tiles, tl.int64)
        of_record = tile % tiles
        within = tl.cast(of_record // pieces, tl.int64)
        begin = tl.cast(of_record % pieces, tl.int64) * WIDTH
        first = record * part + within * group
        left = tl.minimum(tl.minimum(count - first, part - within * group), group) - begin
        left = tl.maximum(tl.minimum(left, WIDTH), 0).to(tl.int32)
        at = record * part_code_stride + within * group_bytes + (begin if BITS == 8 else begin // 2)
        scale_at = record * part_scale_stride + within
        if BITS == 8:
            values = value_of(load_flat(codes + at, left, WIDTH), FORMAT) * tl.load(scales + scale_at)
            for source in range(1, sources):
                step = tl.cast(source, tl.int64)
                term = value_of(load_flat(codes + (at + step * code_stride), left, WIDTH), FORMAT)
                values += term * tl.load(scales + (scale_at + step * scale_stride))
            result, exceeded = narrowed(mean_or_sum(values, sources, AVERAGE), BELOW_INF, DTYPE, OVERFLOW)
        else:
            low, high = unpacked(load_flat(codes + at, (left + 1) // 2, WIDTH // 2), FORMAT)
            scale = tl.load(scales + scale_at)
            even = low * scale
            odd = high * scale
            for source in range(1, sources):
                step = tl.cast(source, tl.int64)
                pairs = load_flat(codes + (at + step * code_stride), (left + 1) // 2, WIDTH // 2)
                low, high = unpacked(pairs, FORMAT)
                scale = tl.load(scales + (scale_at + step * scale_stride))
                even += low * scale
                odd += high * scale
            low, low_exceeded = narrowed(mean_or_sum(even, sources, AVERAGE), BELOW_INF, DTYPE, OVERFLOW)
            high, high_exceeded = narrowed(mean_or_sum(odd, sources, AVERAGE), BELOW_INF, DTYPE, OVERFLOW)
            result = tl.reshape(tl.join(low, high), [WIDTH])
            exceeded = low_exceeded | high_exceeded
        store_flat(out + (first + begin), result, left, WIDTH)
        if OVERFLOW == RAISE:
            note_overflow(overflow_flag, tl.max(exceeded.to(tl.int32), axis=0))


@triton.jit
def requantize_groups(
    codes, scales, tensors, sources, code_stride, scale_stride, error, new_codes, new_scales, new_tensors, count,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, FORMAT: tl.constexpr,
    AVERAGE: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """Sums the sources of one part and quantizes the sum in the same groups, which fit a tile."""
    span: tl.constexpr = ROWS * GROUP
    span_bytes: tl.constexpr = ROWS * (GROUP if BITS == 8 else (GROUP + 1) // 2)
    for tile in range(tl.program_id(0), pieces_of(count, span), tl.num_programs(0)):
        at = tl.cast(tile, tl.int64)
        first = at * span
        left = tl.minimum(count - first, span).to(tl.int32)
        its_codes = codes + at * span_bytes
        its_scales = scales + at * ROWS
        tensor = tensor_of(new_tensors, 0, 0, FORMAT)
        rows_left = tl.cdiv(left, GROUP)
        if BITS == 8:
            values = load_sum(
                its_codes, its_scales, tensors, sources, code_stride, scale_stride, rows_left, left,
                GROUP, ROWS, WIDTH, AVERAGE, FORMAT,
            )  # fmt: skip
            values = only_elements(values, left, 0, 1, GROUP, ROWS, WIDTH)
            if FEEDBACK:
                values += load_tile(error + first, left, GROUP, ROWS, WIDTH)
            store_quantized(
                values, left, new_codes + at * span_bytes, new_scales + at * ROWS, tensor, error + first,
                GROUP, ROWS, WIDTH, FEEDBACK, FORMAT,
            )  # fmt: skip
        else:
            even, odd = load_sum_of_pairs(
                its_codes, its_scales, tensors, sources, code_stride, scale_stride, rows_left, left,
                GROUP, ROWS, WIDTH, AVERAGE, FORMAT,
            )  # fmt: skip
            even = only_elements(even, left, 0, 2, GROUP, ROWS, WIDTH // 2)
            odd = only_elements(odd, left, 1, 2, GROUP, ROWS, WIDTH // 2)
            if FEEDBACK:
                more_even, more_odd = halves(load_tile(error + first, left, GROUP, ROWS, WIDTH), ROWS, WIDTH)
                even += more_even
                odd += more_odd
            store_quantized_pairs(
                even, odd, left, new_codes + at * span_bytes, new_scales + at * ROWS, tensor, error + first,
                GROUP, ROWS, WIDTH, FEEDBACK, FORMAT,
            )  # fmt: skip
