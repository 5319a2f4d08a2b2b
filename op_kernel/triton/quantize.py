"""Quantization with a scale per group, on parts of a vector that lie in records.

A part is ``part`` elements of the input and begins with a group; its scales and codes lie ``scale_stride`` and
``code_stride`` behind those of the part before. One pass over memory: every tile is read once and written once, save
for groups longer than a tile, which are read twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alltoallv.triton_kernels.numbers import INF, codes_of, magnitude_of, scale_of
from alltoallv.triton_kernels.tiles import load_tile, store_codes, store_tile


@triton.jit
def store_quantized(
    values, left, codes, scales, error,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """Codes, scales and lost parts of a tile of whole groups, ``left`` elements of them."""
    largest = tl.max(magnitude_of(values), axis=1)
    scale, inverse = scale_of(largest, BITS)
    rows = tl.arange(0, ROWS)
    tl.store(scales + rows, scale, mask=rows * GROUP < left)
    quotients = codes_of(values, largest[:, None], inverse[:, None], BITS)
    store_codes(codes, quotients, left, GROUP, ROWS, WIDTH, BITS)
    if FEEDBACK:
        lost = values - quotients.to(tl.float32) * scale[:, None]
        store_tile(error, tl.where(largest[:, None] < INF, lost, 0.0), left, GROUP, ROWS, WIDTH)


@triton.jit
def quantize_groups(
    x, error, codes, scales, count, part, code_stride, scale_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """Groups that fit a tile: WIDTH >= GROUP, ROWS of them at a time."""
    span: tl.constexpr = ROWS * GROUP
    span_bytes: tl.constexpr = ROWS * (GROUP if BITS == 8 else (GROUP + 1) // 2)
    tiles = tl.cdiv(part, span)
    for tile in range(tl.program_id(0), tiles * tl.cdiv(count, part), tl.num_programs(0)):
        record = tl.cast(tile // tiles, tl.int64)
        within = tl.cast(tile % tiles, tl.int64)
        first = record * part + within * span
        left = tl.minimum(tl.minimum(count - first, part - within * span), span).to(tl.int32)
        values = load_tile(x + first, left, GROUP, ROWS, WIDTH).to(tl.float32)
        if FEEDBACK:
            values += load_tile(error + first, left, GROUP, ROWS, WIDTH)
        store_quantized(
            values, left, codes + (record * code_stride + within * span_bytes),
            scales + (record * scale_stride + within * ROWS), error + first, GROUP, ROWS, WIDTH, BITS, FEEDBACK,
        )  # fmt: skip


@triton.jit
def quantize_long_groups(
    x, error, codes, scales, count, part, group, code_stride, scale_stride,
    WIDTH: tl.constexpr, BITS: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """Groups longer than a tile: read once for the largest magnitude, again for the codes."""
    groups = tl.cdiv(part, group)
    group_bytes = group if BITS == 8 else (group + 1) // 2
    for item in range(tl.program_id(0), groups * tl.cdiv(count, part), tl.num_programs(0)):
        record = tl.cast(item // groups, tl.int64)
        within = tl.cast(item % groups, tl.int64)
        first = record * part + within * group
        left = tl.minimum(tl.minimum(count - first, part - within * group), group).to(tl.int32)
        largest = tl.zeros([1], tl.int32)
        for begin in range(0, left, WIDTH):
            values = load_tile(x + first + begin, left - begin, WIDTH, 1, WIDTH).to(tl.float32)
            if FEEDBACK:
                values += load_tile(error + first + begin, left - begin, WIDTH, 1, WIDTH)
            largest = tl.maximum(largest, tl.max(magnitude_of(values), axis=1))
        scale, inverse = scale_of(largest, BITS)
        only = tl.arange(0, 1)
        tl.store(scales + (record * scale_stride + within) + only, scale, mask=only < left)
        for begin in range(0, left, WIDTH):
            values = load_tile(x + first + begin, left - begin, WIDTH, 1, WIDTH).to(tl.float32)
            if FEEDBACK:
                values += load_tile(error + first + begin, left - begin, WIDTH, 1, WIDTH)
            quotients = codes_of(values, largest[:, None], inverse[:, None], BITS)
            at = record * code_stride + within * group_bytes + (begin if BITS == 8 else begin // 2)
            store_codes(codes + at, quotients, left - begin, WIDTH, 1, WIDTH, BITS)
            if FEEDBACK:
                lost = values - quotients.to(tl.float32) * scale[:, None]
                lost = tl.where(largest[:, None] < INF, lost, 0.0)
                store_tile(error + first + begin, lost, left - begin, WIDTH, 1, WIDTH)
