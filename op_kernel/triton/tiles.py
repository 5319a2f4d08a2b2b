"""Tiles: ROWS groups of WIDTH columns, of which the last row and the last columns may be empty."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(pointer, left, STRIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of STRIDE elements, ``left`` elements in all; zeros elsewhere. Shape [ROWS, WIDTH]."""
    if STRIDE == WIDTH:
        flat = tl.arange(0, ROWS * WIDTH)
        return tl.reshape(tl.load(pointer + flat, mask=flat < left, other=0), [ROWS, WIDTH])
    else:
        columns = tl.arange(0, WIDTH)[None, :]
        at = tl.arange(0, ROWS)[:, None] * STRIDE + columns
        return tl.load(pointer + at, mask=(columns < STRIDE) & (at < left), other=0)


@triton.jit
def store_tile(pointer, values, left, STRIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """What `load_tile` reads."""
    if STRIDE == WIDTH:
        flat = tl.arange(0, ROWS * WIDTH)
        tl.store(pointer + flat, tl.reshape(values, [ROWS * WIDTH]), mask=flat < left)
    else:
        columns = tl.arange(0, WIDTH)[None, :]
        at = tl.arange(0, ROWS)[:, None] * STRIDE + columns
        tl.store(pointer + at, values, mask=(columns < STRIDE) & (at < left))


@triton.jit
def code_bytes(count, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Bytes of the codes of ``count`` elements that begin with a group."""
    if BITS == 8:
        return count
    else:
        return count // GROUP * ((GROUP + 1) // 2) + (count % GROUP + 1) // 2


@triton.jit
def store_codes(pointer, codes, left, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Int32 codes of ``left`` elements, as bytes; the even element of a pair in the low half."""
    if BITS == 8:
        store_tile(pointer, codes.to(tl.int8), left, GROUP, ROWS, WIDTH)
    else:
        low, high = tl.split(tl.reshape(codes, [ROWS, WIDTH // 2, 2]))
        packed = (high * 16 + (low & 15)).to(tl.int8)  # high is at least -7, so this is one signed byte
        store_tile(pointer, packed, code_bytes(left, GROUP, BITS), (GROUP + 1) // 2, ROWS, WIDTH // 2)


@triton.jit
def load_codes(pointer, left, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Float32 values of the codes that `store_codes` has stored."""
    if BITS == 8:
        return load_tile(pointer, left, GROUP, ROWS, WIDTH).to(tl.float32)
    else:
        byte = load_tile(pointer, code_bytes(left, GROUP, BITS), (GROUP + 1) // 2, ROWS, WIDTH // 2).to(tl.int32)
        pair = tl.join((((byte & 15) ^ 8) - 8).to(tl.float32), (byte >> 4).to(tl.float32))
        return tl.reshape(pair, [ROWS, WIDTH])
