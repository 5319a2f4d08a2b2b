"""Tiles: ROWS groups of WIDTH columns, of which the last row and the last columns may be empty; and flat pieces.

Masks are bounds of a range (``index < end``), which triton-ascend turns into regions. It turns other masks into
read-modify-writes, which reach beyond the tile's own elements; so `launch` uses rows that are not full (STRIDE < WIDTH)
on GPUs only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alltoallv_triton.numbers import value_of


@triton.jit
def pieces_of(count, size):
    """Returns the number of pieces of ``size`` in ``count`` > 0. `tl.cdiv` adds both, which an int32 may not hold."""
    return (count - 1) // size + 1


@triton.jit
def load_flat(pointer, left, WIDTH: tl.constexpr):
    """Loads ``left`` elements, then zeros. Shape [WIDTH]."""
    at = tl.arange(0, WIDTH)
    return tl.load(pointer + at, mask=at < left, other=0)


@triton.jit
def store_flat(pointer, values, left, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(pointer + at, values, mask=at < left)


@triton.jit
def load_tile(pointer, left, STRIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Loads rows of STRIDE elements, ``left`` elements in all; zeros elsewhere. Shape [ROWS, WIDTH]."""
    if STRIDE == WIDTH:
        return tl.reshape(load_flat(pointer, left, ROWS * WIDTH), [ROWS, WIDTH])
    else:
        columns = tl.arange(0, WIDTH)[None, :]
        at = tl.arange(0, ROWS)[:, None] * STRIDE + columns
        return tl.load(pointer + at, mask=(columns < STRIDE) & (at < left), other=0)


@triton.jit
def store_tile(pointer, values, left, STRIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Stores values where `load_tile` reads them."""
    if STRIDE == WIDTH:
        store_flat(pointer, tl.reshape(values, [ROWS * WIDTH]), left, ROWS * WIDTH)
    else:
        columns = tl.arange(0, WIDTH)[None, :]
        at = tl.arange(0, ROWS)[:, None] * STRIDE + columns
        tl.store(pointer + at, values, mask=(columns < STRIDE) & (at < left))


@triton.jit
def only_elements(
    values, left, first, STEP: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Puts zeros where the tile holds no element: there a code of 0 times an infinite scale would be NaN.

    Column c of ``values`` is column ``first + c * STEP`` of rows of STRIDE.
    """
    columns = tl.arange(0, WIDTH)[None, :] * STEP + first
    at = tl.arange(0, ROWS)[:, None] * STRIDE + columns
    return tl.where((columns < STRIDE) & (at < left), values, 0.0)


@triton.jit
def code_bytes(count, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Returns the bytes of the codes of ``count`` elements that begin with a group."""
    if BITS == 8:
        return count
    else:
        return count // GROUP * ((GROUP + 1) // 2) + (count % GROUP + 1) // 2


@triton.jit
def halves(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the even and the odd elements of rows of WIDTH, each [ROWS, WIDTH // 2].

    Pass values in the order in which they were loaded: triton-ascend allows only two dimensions here, one for the pair.
    """
    even, odd = tl.split(tl.reshape(values, [ROWS * WIDTH // 2, 2]))
    return tl.reshape(even, [ROWS, WIDTH // 2]), tl.reshape(odd, [ROWS, WIDTH // 2])


@triton.jit
def joined(even, odd, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Joins what `halves` has split."""
    size: tl.constexpr = ROWS * WIDTH // 2
    return tl.reshape(tl.join(tl.reshape(even, [size]), tl.reshape(odd, [size])), [ROWS, WIDTH])


@triton.jit
def packed(even, odd):
    """Packs two int32 codes of 4 bits into one signed byte, the even element's in the low half."""
    return (odd * 16 + (even & 15)).to(tl.int8)


@triton.jit
def unpacked(byte, FORMAT: tl.constexpr):
    """Returns the float32 values of the two codes in a byte."""
    pair = byte.to(tl.int32)
    return value_of(((pair & 15) ^ 8) - 8, FORMAT), value_of(pair >> 4, FORMAT)
