"""Quantizes vectors with a scale per group, in parts that lie in records.

A part has ``part`` elements of the input and begins with a group; its scales and codes lie ``scale_stride`` and
``code_stride`` after the codes of the part before. The kernels read and write every tile once, except for groups longer
than a tile, which they read twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alltoallv_triton.numbers import (
    FP8_E5M2,
    INF,
    NVFP4,
    byte_of,
    codes_of,
    magnitude_of,
    scale_of,
    scale_of_byte,
    value_of,
)
from alltoallv_triton.tiles import (
    code_bytes,
    halves,
    joined,
    load_flat,
    load_tile,
    packed,
    pieces_of,
    store_flat,
    store_tile,
)

LANES = tl.constexpr(8)


@triton.jit
def store_scales(scales, scale, left, GROUP: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    # A bound as mask, not a product: else triton-ascend reads, merges and writes whole tiles, beyond the last scale,
    # too.
    tl.store(scales + rows, scale, mask=rows < tl.cdiv(left, GROUP))


@triton.jit
def scale_and_store(scales, largest, tensor, left, GROUP: tl.constexpr, ROWS: tl.constexpr, FORMAT: tl.constexpr):
    """Stores the scales of a tile's groups; returns scales and inverses."""
    if FORMAT <= FP8_E5M2:
        scale, inverse = scale_of(largest, FORMAT)
        store_scales(scales, scale, left, GROUP, ROWS)
    else:
        byte, inverse = byte_of(largest, tensor, FORMAT)
        store_scales(scales, byte.to(tl.int8), left, GROUP, ROWS)
        scale = scale_of_byte(byte, tensor, FORMAT)
    return scale, inverse


@triton.jit
def lost_by(values, codes, largest, scale, FORMAT: tl.constexpr):
    """Returns the rounding errors of the codes; 0 where the group is not finite."""
    return tl.where(largest < INF, values - value_of(codes, FORMAT) * scale, 0.0)


@triton.jit
def store_quantized(
    values, left, codes, scales, tensor, error, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    FEEDBACK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Stores 8-bit codes, scales and rounding errors of a tile of whole groups with ``left`` elements."""
    largest = tl.max(magnitude_of(values), axis=1)
    scale, inverse = scale_and_store(scales, largest, tensor, left, GROUP, ROWS, FORMAT)
    quotients = codes_of(values, largest[:, None], inverse[:, None], FORMAT)
    store_tile(codes, quotients.to(tl.int8), left, GROUP, ROWS, WIDTH)
    if FEEDBACK:
        lost = lost_by(values, quotients, largest[:, None], scale[:, None], FORMAT)
        store_tile(error, lost, left, GROUP, ROWS, WIDTH)


@triton.jit
def store_quantized_pairs(
    even, odd, left, codes, scales, tensor, error, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    FEEDBACK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Stores 4-bit codes like `store_quantized`, from a tile's even and odd elements."""
    largest = tl.max(tl.maximum(magnitude_of(even), magnitude_of(odd)), axis=1)
    scale, inverse = scale_and_store(scales, largest, tensor, left, GROUP, ROWS, FORMAT)
    low = codes_of(even, largest[:, None], inverse[:, None], FORMAT)
    high = codes_of(odd, largest[:, None], inverse[:, None], FORMAT)
    store_tile(codes, packed(low, high), code_bytes(left, GROUP, 4), (GROUP + 1) // 2, ROWS, WIDTH // 2)
    if FEEDBACK:
        even = lost_by(even, low, largest[:, None], scale[:, None], FORMAT)
        odd = lost_by(odd, high, largest[:, None], scale[:, None], FORMAT)
        store_tile(error, joined(even, odd, ROWS, WIDTH), left, GROUP, ROWS, WIDTH)


@triton.jit
def tensor_of(tensors, record, scale_stride, FORMAT: tl.constexpr):
    """Loads NVFP4's scale of all groups of a record, which lies before the groups' scales."""
    if FORMAT == NVFP4:
        return tl.load(tensors + record * (scale_stride // 4))
    else:
        return 1.0


@triton.jit
def quantize_groups(
    x, error, codes, scales, tensors, count, part, code_stride, scale_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, FORMAT: tl.constexpr,
    FEEDBACK: tl.constexpr,
):  # fmt: skip
    """Quantizes groups that fit a tile: WIDTH >= GROUP, ROWS groups at a time."""
    span: tl.constexpr = ROWS * GROUP
    span_bytes: tl.constexpr = ROWS * (GROUP if BITS == 8 else (GROUP + 1) // 2)
    tiles = pieces_of(part, span)
    for tile in range(tl.program_id(0), tiles * pieces_of(count, part), tl.num_programs(0)):
        record = tl.cast(tile // tiles, tl.int64)
        within = tl.cast(tile % tiles, tl.int64)
        first = record * part + within * span
        left = tl.minimum(tl.minimum(count - first, part - within * span), span).to(tl.int32)
        values = load_tile(x + first, left, GROUP, ROWS, WIDTH).to(tl.float32)
        if FEEDBACK:
            values += load_tile(error + first, left, GROUP, ROWS, WIDTH)
        its_codes = codes + (record * code_stride + within * span_bytes)
        its_scales = scales + (record * scale_stride + within * ROWS)
        tensor = tensor_of(tensors, record, scale_stride, FORMAT)
        if BITS == 8:
            store_quantized(
                values, left, its_codes, its_scales, tensor, error + first, GROUP, ROWS, WIDTH, FEEDBACK, FORMAT
            )
        else:
            even, odd = halves(values, ROWS, WIDTH)
            store_quantized_pairs(
                even, odd, left, its_codes, its_scales, tensor, error + first, GROUP, ROWS, WIDTH, FEEDBACK, FORMAT
            )


@triton.jit
def load_values(x, error, left, WIDTH: tl.constexpr, FEEDBACK: tl.constexpr):
    values = load_flat(x, left, WIDTH).to(tl.float32)
    if FEEDBACK:
        values += load_flat(error, left, WIDTH)
    return values


@triton.jit
def quantize_pieces(
    x, error, codes, scales, count, part, group, code_stride, scale_stride,
    WIDTH: tl.constexpr, BITS: tl.constexpr, FORMAT: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """Quantizes groups of at most ``part``, one at a time: reads the pieces for the largest magnitude, then for the
    codes.
    """
    groups = pieces_of(part, group)
    group_bytes = group if BITS == 8 else (group + 1) // 2
    for item in range(tl.program_id(0), groups * pieces_of(count, part), tl.num_programs(0)):
        record = tl.cast(item // groups, tl.int64)
        within = tl.cast(item % groups, tl.int64)
        first = record * part + within * group
        length = tl.minimum(tl.minimum(count - first, part - within * group), group)
        pieces = tl.cdiv(length, WIDTH).to(tl.int32)
        lanes = tl.zeros([LANES], tl.int32)
        for piece in range(0, pieces):
            begin = tl.cast(piece, tl.int64) * WIDTH
            left = tl.minimum(length - begin, WIDTH).to(tl.int32)
            values = load_values(x + first + begin, error + first + begin, left, WIDTH, FEEDBACK)
            lanes = tl.maximum(lanes, tl.max(tl.reshape(magnitude_of(values), [LANES, WIDTH // LANES]), axis=1))
        largest = tl.max(lanes, axis=0)
        # All lanes compute the same value; triton-ascend has no exact division of a scalar.
        scales_of_lanes, inverses = scale_of(tl.maximum(lanes, largest), FORMAT)
        store_flat(scales + (record * scale_stride + within), scales_of_lanes, tl.minimum(pieces, 1), LANES)
        scale = tl.max(scales_of_lanes, axis=0)
        inverse = tl.max(inverses, axis=0)
        for piece in range(0, pieces):
            begin = tl.cast(piece, tl.int64) * WIDTH
            left = tl.minimum(length - begin, WIDTH).to(tl.int32)
            values = load_values(x + first + begin, error + first + begin, left, WIDTH, FEEDBACK)
            at = record * code_stride + within * group_bytes + (begin if BITS == 8 else begin // 2)
            quotients = codes_of(values, largest, inverse, FORMAT)
            if BITS == 8:
                store_flat(codes + at, quotients.to(tl.int8), left, WIDTH)
            else:
                low, high = tl.split(tl.reshape(quotients, [WIDTH // 2, 2]))
                store_flat(codes + at, packed(low, high), (left + 1) // 2, WIDTH // 2)
            if FEEDBACK:
                store_flat(error + first + begin, lost_by(values, quotients, largest, scale, FORMAT), left, WIDTH)
