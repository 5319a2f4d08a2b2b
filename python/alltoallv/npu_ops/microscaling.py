"""Numbers of 8 and 4 bits that share scales in blocks: microscaling (mx), and what products of them multiply.

A scale of mx is a power of two, float8_e8m0: a byte with its exponent. Scales of 64 numbers lie together, so that there
are [.., n / 64, 2] of them. Two numbers of four bits lie in a byte, the first in its lower half. The devices' names of
dtypes that torch lacks are numbers from 256 on; their tensors have the dtype uint8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from alltoallv.npu_ops.registry import expect, operator

__all__ = [
    "E1M2",
    "E2M1",
    "E4M3",
    "E5M2",
    "Blocks",
    "Element",
    "element_of",
    "is_scale",
    "packed",
    "product_of_blocks",
    "quantize_blocks",
    "to_codes",
]

_BLOCK = 32


class Element(NamedTuple):
    """A floating point format of 8 or 4 bits."""

    name: str
    dtype: torch.dtype  # of its tensors
    largest: float
    exponent: int  # of the largest number
    mantissa: int = 0  # its bits, where two numbers lie in a byte
    values: tuple[float, ...] = ()  # of the codes without a sign, likewise


E5M2 = Element("float8_e5m2", torch.float8_e5m2, 57344.0, 15)
E4M3 = Element("float8_e4m3fn", torch.float8_e4m3fn, 448.0, 8)
E2M1 = Element("float4_e2m1fn_x2", torch.uint8, 6.0, 2, 1, (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
E1M2 = Element("float4_e1m2fn_x2", torch.uint8, 1.75, 0, 2, (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75))
_BY_CODE = {23: E5M2, 291: E5M2, 24: E4M3, 292: E4M3, 45: E2M1, 296: E2M1, 297: E1M2}
_BY_DTYPE = {torch.float8_e5m2: E5M2, torch.float8_e4m3fn: E4M3}
_SCALES = (44, 293, torch.float8_e8m0fnu)  # 44 is torch's number of it, 293 the device's


def element_of(code: int | torch.dtype | None) -> Element | None:
    """Returns the format that an argument of an operator means, or None if it is another dtype."""
    return _BY_DTYPE.get(code) if isinstance(code, torch.dtype) else _BY_CODE.get(code or 0)


def is_scale(argument: str, scale: Tensor | None, dtype: int | None) -> bool:
    """Returns whether a tensor has scales of mx; raises for an argument ``dtype`` that does not go with it."""
    expect(dtype is None or dtype in _SCALES, f"{argument}_dtype", dtype, "float8_e8m0fnu, or None")
    expect(dtype is None or scale is not None, argument, scale, f"a tensor, where there is a {argument}_dtype")
    if scale is None:
        return False
    fits = dtype is None or scale.itemsize == 1
    expect(fits, argument, scale, "one byte for each scale, for float8_e8m0fnu")
    return dtype is not None or scale.dtype == torch.float8_e8m0fnu


def elements(argument: str, codes: Tensor, dtype: int | None) -> Element:
    """Returns the format of a tensor's numbers, which an argument ``dtype`` names where the tensor's own does not."""
    expected = "float8_e5m2 or float8_e4m3fn, or float4_e2m1fn_x2 or float4_e1m2fn_x2 in bytes"
    named, own = element_of(dtype), _BY_DTYPE.get(codes.dtype)
    expect(dtype is None or named is not None, f"{argument}_dtype", dtype, expected)
    element = named or own
    if element is None or codes.dtype not in (element.dtype, torch.int8 if element.values else element.dtype):
        expect(False, argument, codes, expected)
    assert element is not None
    return element


def _unpacked(codes: Tensor, element: Element) -> Tensor:
    """Returns the numbers of codes of four bits, twice as many along the last dimension."""
    table = torch.tensor([*element.values, *(-value for value in element.values)])
    both = codes.view(torch.uint8).long()
    return table[torch.stack([both & 15, both >> 4], -1).flatten(-2)]


def block_values(codes: Tensor, element: Element, inner: int, dim: int) -> Tensor:
    """Returns the numbers of a matrix in float32; ``inner`` is how many it has along ``dim``, of -1 and -2.

    Numbers of four bits may also be packed along the other dimension.
    """
    if not element.values:
        return codes.float()
    packed_here = codes.size(dim) * 2 == inner
    along_last = packed_here == (dim == -1)
    return _unpacked(codes, element) if along_last else _unpacked(codes.mT, element).mT


def scale_values(scale: Tensor) -> Tensor:
    """Returns scales of mx, of which 255 is NaN, in float32."""
    exponent = scale.view(torch.uint8).float() - 127
    return torch.where(exponent == 128, torch.nan, torch.exp2(exponent.double()).float())


def dequantize_blocks(values: Tensor, scale: Tensor, argument: str) -> Tensor:
    """Returns numbers [.., n] times their scales [.., n / 64, 2]: one for each 32 numbers of the last dimension."""
    n = values.size(-1)
    expected = (*values.shape[:-1], -(-n // (2 * _BLOCK)), 2)
    expect(scale.shape == expected, argument, scale, f"the shape {expected}, a scale for {_BLOCK} numbers")
    return values * scale_values(scale).flatten(-2).repeat_interleave(_BLOCK, -1)[..., :n]


def to_codes(values: Tensor, element: Element) -> Tensor:
    """Rounds float32 values to the nearest numbers of a format, halves to even codes, beyond its range its largest.

    Numbers of four bits have a byte each, until they are `packed`.
    """
    values = values.clamp(-element.largest, element.largest)
    if not element.values:
        return values.to(element.dtype)
    size = values.abs()
    step = torch.exp2((torch.frexp(size)[1] - 1).clamp(min=0).float() - element.mantissa)
    rounded = (size / step).round() * step
    codes = torch.searchsorted(torch.tensor(element.values), rounded) + 8 * torch.signbit(values)
    return codes.to(torch.uint8)


def packed(codes: Tensor, element: Element) -> Tensor:
    """Returns codes of four bits two by two, along the last dimension, and codes of eight as they are."""
    return codes[..., ::2] | codes[..., 1::2] << 4 if element.values else codes


def _shared_exponents(largest: Tensor, element: Element, rounds_up: bool) -> Tensor:
    """Returns the exponents of blocks with these largest sizes: the numbers' own, less that of the format's largest.

    With ``rounds_up`` the exponent is the least with which the block's largest number stays in the format's range.
    """
    if rounds_up:
        mantissa, exponent = torch.frexp(largest / element.largest)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    else:
        exponent = torch.frexp(largest)[1] - 1 - element.exponent
    return exponent.masked_fill(largest == 0, -127).clamp(min=-127).masked_fill(~largest.isfinite(), 128)


def quantize_blocks(
    x: Tensor, element: Element, block: int = _BLOCK, rounds_up: bool = False, smallest: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns the codes of float32 numbers [.., n], and their scales as bytes [.., n / (2 * block), 2].

    Sizes of blocks below ``smallest`` count as it.
    """
    n = x.size(-1)
    count = -(-n // block)
    blocks = functional.pad(x, (0, count * block - n)).unflatten(-1, (count, block))
    exponent = _shared_exponents(blocks.abs().amax(-1).clamp(min=smallest), element, rounds_up)
    values = (blocks * torch.exp2(-exponent.double()).unsqueeze(-1)).float().flatten(-2)[..., :n]
    scale = functional.pad((exponent + 127).to(torch.uint8), (0, count % 2))
    return to_codes(values, element), scale.unflatten(-1, (-1, 2))


class Blocks(NamedTuple):
    """A matrix of mx: its codes with the dtype that an argument names, and its scales."""

    name: str
    codes: Tensor
    dtype: int | None
    scale_name: str
    scale: Tensor


def product_of_blocks(a: Blocks, b: Blocks) -> Tensor:
    """Multiplies mx matrices [.., m, k] and [.., k, n] in float32; scales are [.., m, k / 64, 2] and
    [.., k / 64, n, 2].
    """
    first, second = (elements(blocks.name, blocks.codes, blocks.dtype) for blocks in (a, b))
    k = a.codes.size(-1) * (2 if first.values else 1)
    rows, columns = block_values(a.codes, first, k, -1), block_values(b.codes, second, k, -2).mT
    expect(columns.size(-1) == k, b.name, b.codes, f"{k} rows")
    swapped = b.scale.transpose(-3, -2) if b.scale.dim() > 2 else b.scale
    return dequantize_blocks(rows, a.scale, a.scale_name) @ dequantize_blocks(columns, swapped, b.scale_name).mT


@operator("npu_dynamic_mx_quant")
def dynamic_mx_quant(
    input: Tensor, axis: int, round_mode: str, dst_type: int, block_size: int, scale_alg: int | None
) -> tuple[Tensor, Tensor]:
    """Quantizes blocks along an axis; returns the numbers, and the bytes of their scales, two by two.

    With ``scale_alg`` 0 a block's scale has the exponent of its largest number, with 1 (eight bits only) the least one
    that keeps it in range.
    """
    element = element_of(dst_type)
    if element is None:
        expect(False, "dst_type", dst_type, "float8_e5m2, float8_e4m3fn, float4_e2m1fn_x2 or float4_e1m2fn_x2")
        raise AssertionError
    expect(round_mode == "rint", "round_mode", round_mode, "rint")
    expect(block_size in range(32, 1025, 32), "block_size", block_size, "a multiple of 32 up to 1024")
    modes = (None, 0) if element.values else (None, 0, 1)
    expect(scale_alg in modes, "scale_alg", scale_alg, " or ".join(map(str, modes[1:])))
    expect(-input.dim() <= axis < input.dim(), "axis", axis, f"an axis of {input.dim()}")
    even = not element.values or input.size(-1) % 2 == 0
    expect(even, "input", input, "a last dimension that is even, for four bits")
    rows = input.detach().float().movedim(axis, -1)
    codes, scale = quantize_blocks(rows, element, block_size, scale_alg == 1)
    y = packed(codes.movedim(-1, axis).contiguous(), element)
    return y, scale.movedim(-2, axis % input.dim()).contiguous()
