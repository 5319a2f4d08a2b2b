"""Sums over ranks of numbers that travel in 8 bits: `quant_all_reduce` and `quant_reduce_scatter`, of Ascend 950."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alltoallv.npu_ops import groups, limits
from alltoallv.npu_ops.microscaling import dequantize_blocks, is_scale
from alltoallv.npu_ops.registry import Formula, Operator, expect, present
from alltoallv_emulator.host_views import on_host

__all__ = ["quant_all_reduce", "quant_reduce_scatter"]

_PER_SCALE = 128  # numbers of a row that share a scale of float32
_HIFLOAT8 = 290
# What the numbers and the results may be, by torch's and the devices' numbers of dtypes.
_NUMBERS = {1: torch.int8, 258: torch.int8, 23: torch.float8_e5m2, 291: torch.float8_e5m2}
_NUMBERS |= {24: torch.float8_e4m3fn, 292: torch.float8_e4m3fn, _HIFLOAT8: torch.uint8}
_RESULTS = {None: torch.bfloat16, 15: torch.bfloat16, 283: torch.bfloat16, 5: torch.float16, 257: torch.float16}
_RESULTS |= {6: torch.float32, 256: torch.float32}
_FLOAT32 = (6, 256)

_library = torch.library.Library("cann_ops_transformer", "FRAGMENT")


def _hifloat8() -> Tensor:
    """Returns the number that each code of hifloat8 means, in float32.

    Behind the sign a prefix says how many bits the exponent has: 11, 10, 01, 001, 0001 for 4, 3, 2, 1, 0. The exponent
    is a sign and a magnitude, whose first 1 is left out; the mantissa has the bits that are left. Codes that begin with
    0000 are smaller powers of two.
    """
    numbers = torch.empty(256)
    for code in range(128):
        if code < 8:
            number = 2.0 ** (code - 23) if code else 0.0
        else:
            bits, width = next(
                (exponent, 2 if exponent > 1 else 4 - exponent)
                for exponent, least in ((4, 0x60), (3, 0x40), (2, 0x20), (1, 0x10), (0, 0x08))
                if code >= least
            )
            mantissa_bits = 7 - width - bits
            mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
            own = code >> mantissa_bits & ((1 << bits) - 1)
            exponent = 0
            if bits:
                magnitude = (1 << bits - 1) | (own & ((1 << bits - 1) - 1))
                exponent = -magnitude if own >> bits - 1 else magnitude
            number = 2.0**exponent * (1 + mantissa)
        numbers[code], numbers[code + 128] = number, -number
    numbers[0x6F], numbers[0xEF], numbers[0x80] = torch.inf, -torch.inf, torch.nan
    return numbers


def _breaches(name: str, size: int, hidden: int, rows: int, nbytes: int) -> list[str]:
    need = 2 * (nbytes + (1 << 20))
    found = [f"world_size is {size}, expected 2, 4 or 8 on 950"] * (size not in (2, 4, 8))
    found += [f"x has rows of {hidden}, expected 1024 to 8192 on 950"] * (not 1024 <= hidden <= 8192)
    found += [f"x has {rows} rows, expected a multiple of {size}, the world size, on 950"] * (rows % size != 0)
    enough = limits.buffer_mb() << 20 >= need
    return found + [f"HCCL_BUFFSIZE is {limits.buffer_mb()}, expected {-(-need >> 20)} at least on 950"] * (not enough)


def _values(x: Tensor, scales: Tensor, x_dtype: int | None, scales_dtype: int | None) -> Tensor:
    """Returns the numbers times their scales, in float32."""
    known = x_dtype is None or x_dtype in _NUMBERS
    expect(known, "x_dtype", x_dtype, "int8, float8_e4m3fn, float8_e5m2 or hifloat8, or None")
    expected = "int8, float8_e4m3fn or float8_e5m2, or uint8 where x_dtype is hifloat8"
    expect(x.dtype in {*_NUMBERS.values()} - {torch.uint8} if x_dtype is None else True, "x", x, expected)
    expect(x_dtype is None or x.dtype == _NUMBERS[x_dtype], "x", x, f"{_NUMBERS.get(x_dtype or 0)}, as x_dtype says")
    expect(x.dim() in (2, 3) and x.numel() > 0, "x", x, "numbers, in 2 or 3 dimensions")
    expect(x.size(-1) % _PER_SCALE == 0, "x", x, f"rows of a multiple of {_PER_SCALE}")
    numbers = _hifloat8()[x.long()] if x.dtype == torch.uint8 else x.float()
    if is_scale("scales", scales, None if scales_dtype in _FLOAT32 else scales_dtype):
        floats = (torch.float8_e5m2, torch.float8_e4m3fn)
        expect(x.dtype in floats, "x", x, "float8_e4m3fn or float8_e5m2, for scales of float8_e8m0fnu")
        return dequantize_blocks(numbers, scales, "scales")
    shape = (*x.shape[:-1], x.size(-1) // _PER_SCALE)
    fits = scales.dtype == torch.float32 and scales.shape == shape
    expect(fits, "scales", scales, f"float32 of shape {shape}, a scale for {_PER_SCALE} numbers")
    return numbers * scales.repeat_interleave(_PER_SCALE, -1)


def _parts(
    name: str,
    x: Tensor,
    scales: Tensor,
    hcom: str,
    world_size: int,
    reduce_op: str | None,
    output_dtype: int | None,
    x_dtype: int | None,
    scales_dtype: int | None,
) -> tuple[groups.Group, Tensor, torch.dtype]:
    """Checks a call; returns its group, this rank's numbers in float32, and the result's dtype."""
    group = groups.named(hcom, world_size)
    expect(reduce_op in (None, "sum"), "reduce_op", repr(reduce_op), "'sum'")
    dtype = present(_RESULTS.get(output_dtype), "output_dtype", "bfloat16, float16 or float32, or None")
    values = _values(x, scales, x_dtype, scales_dtype)
    rows, nbytes = values.numel() // values.size(-1), x.nbytes + scales.nbytes
    found = _breaches(name, group.size, values.size(-1), rows, nbytes)
    limits.check(lambda product: found, products=("950",))
    same: groups.Values = {"x's shape": list(x.shape), "x's dtype": f"{x.dtype} {x_dtype}"}
    group.agree(name, same | {"scales' shape": list(scales.shape), "output_dtype": str(dtype)})
    return group, values, dtype


def _all_reduce(
    x: Tensor,
    scales: Tensor,
    hcom: str,
    world_size: int,
    reduce_op: str | None,
    output_dtype: int | None,
    x_dtype: int | None,
    scales_dtype: int | None,
) -> Tensor:
    given = (x, scales, hcom, world_size, reduce_op, output_dtype, x_dtype, scales_dtype)
    group, values, dtype = _parts("npu_quant_all_reduce", *given)
    return group.all_gather(values).sum(0).to(dtype)


def _reduce_scatter(
    x: Tensor,
    scales: Tensor,
    hcom: str,
    world_size: int,
    reduce_op: str | None,
    output_dtype: int | None,
    x_dtype: int | None,
    scales_dtype: int | None,
) -> Tensor:
    given = (x, scales, hcom, world_size, reduce_op, output_dtype, x_dtype, scales_dtype)
    rows = x.numel() // max(x.size(-1), 1)
    expect(world_size > 0 and rows % world_size == 0, "x", x, f"rows that {world_size} ranks share equally")
    group, values, dtype = _parts("npu_quant_reduce_scatter", *given)
    return group.reduce_scatter(values.flatten(0, -2)).to(dtype)


def _operator(name: str, formula: Any) -> Any:
    _library.define(
        f"{name}(Tensor x, Tensor scales, str hcom, int world_size, *, str? reduce_op='sum', int? output_dtype=None,"
        " int? x_dtype=None, int? scales_dtype=None) -> Tensor"
    )
    operator: Any = getattr(torch.ops.cann_ops_transformer, name).default
    _library.impl(name, on_host(Operator(name, operator._schema, Formula(formula, frozenset(), True))), "PrivateUse1")
    return operator


_quant_all_reduce = _operator("npu_quant_all_reduce", _all_reduce)
_quant_reduce_scatter = _operator("npu_quant_reduce_scatter", _reduce_scatter)


def quant_all_reduce(
    x: Tensor,
    scales: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str | None = "sum",
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    scales_dtype: int | None = None,
) -> Tensor:
    """Returns the sum over the ranks of their numbers times their scales, in the shape of ``x``.

    Args:
        x: int8, float8_e4m3fn or float8_e5m2, or uint8 that ``x_dtype`` 290 calls hifloat8: (bs, h) or (b, s, h).
        scales: float32, one for 128 numbers: (.., h / 128); or of mx, one for 32: (.., h / 64, 2).
        hcom: HCCL's name of the group.
        world_size: Its size.
        reduce_op: "sum".
        output_dtype: The result's dtype, as a number: bfloat16 (also for None), float16 or float32.
        x_dtype: That of ``x``, as a number, if its own does not say it.
        scales_dtype: That of ``scales``, likewise: 293 for float8_e8m0fnu in bytes.

    The products and sums are in float32, in rank order, rounded once.
    """
    sum_of: Tensor = _quant_all_reduce(
        x, scales, hcom, world_size, reduce_op=reduce_op, output_dtype=output_dtype, x_dtype=x_dtype,
        scales_dtype=scales_dtype,
    )  # fmt: skip
    return sum_of


def quant_reduce_scatter(
    x: Tensor,
    scales: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str | None = "sum",
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    scales_dtype: int | None = None,
) -> Tensor:
    """Returns this rank's rows of what `quant_all_reduce` returns for the same arguments: (b * s / world_size, h)."""
    sum_of: Tensor = _quant_reduce_scatter(
        x, scales, hcom, world_size, reduce_op=reduce_op, output_dtype=output_dtype, x_dtype=x_dtype,
        scales_dtype=scales_dtype,
    )  # fmt: skip
    return sum_of
