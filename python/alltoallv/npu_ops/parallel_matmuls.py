"""Matrix products fused with communication: tensor parallelism's, with a collective before or after, and experts', with
the exchange of their rows.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from alltoallv.npu_ops import groups, limits
from alltoallv.npu_ops.groups import Group
from alltoallv.npu_ops.matmuls import antiquantize, check_dtypes, dequantize, product, to_int8
from alltoallv.npu_ops.quantization import quantize_rows
from alltoallv.npu_ops.registry import dtype_of, expect, operator, variant

_SPEED = ("comm_turn", "comm_mode")  # arguments that change the speed, not the result
_PER_CHANNEL, _PER_TOKEN, _DYNAMIC_PER_TOKEN = 2, 3, 7


def _checked(
    group: Group,
    name: str,
    x1: Tensor,
    x2: Tensor,
    dtype: torch.dtype,
    inner: int,
    shared: int | None = None,
    bias: Tensor | None = None,
    scales: Mapping[str, Tensor | None] = MappingProxyType({}),
    exchanged: Tensor | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[[], None]:
    """Raises for what the formula does not cover or the device refuses; returns the ranks' agreement on the call.

    What can fail comes before the agreement: a rank's failure is announced until then.

    Args:
        dtype: The result's.
        inner: Rows that x2 must have.
        shared: The dimension that the ranks must share equally.
        scales: By the argument's name: the scales of the rows that are multiplied, then any of the columns of x2.
        exchanged: A scale that changes what is exchanged: all ranks have it, or none.
        options: More that must be equal on all ranks, by the argument's name.
    """
    allowed = (2,) if "all_to_all" in name else (2, 3)
    expect(x1.dim() in allowed, "x1", x1, f"{' or '.join(map(str, allowed))} dimensions")
    expect(x2.dim() == 2 and x2.size(0) == inner, "x2", x2, f"a matrix of {inner} rows")
    check_dtypes("x1", x1, "x2", x2, any(scale is not None for scale in list(scales.values())[1:2]))
    columns, rows = x2.size(1), x1.numel() // max(inner, 1)
    equal = shared is None or shared % group.size == 0
    expect(equal, "x1 @ x2", f"of shape {(*x1.shape[:-1], columns)}", f"what {group.size} ranks share equally")
    expect(bias is None or bias.shape in ((columns,), (1, columns)), "bias", bias, f"{columns} numbers")
    first, *others = scales
    alone = scales[first] is not None and scales[others[0]] is None
    expect(not alone, first, scales[first], f"None, where {others[0]} is")
    for number, (argument, scale) in enumerate(scales.items()):
        count = columns if number else rows
        expect(scale is None or scale.numel() in (1, count), argument, scale, f"one number or {count}")
    limits.check(limits.Matmul(name, group.size, x1.size(-1)).breaches)
    same: groups.Values = {f"dimension {axis} of x1": size for axis, size in enumerate(x1.shape)}
    same |= {"columns of x2": columns, "the dtype of x1": str(x1.dtype), "the dtype of the result": str(dtype)}
    same["the presence of scales"] = int(exchanged is not None)
    return functools.partial(group.agree, name, {**same, **options})


def _product(
    x1: Tensor, x2: Tensor, bias: Tensor | None, x1_scale: Tensor | None, x2_scale: Tensor | None, late: bool = False
) -> Tensor:
    """Returns (x1 @ x2 + bias) * scales in float32; with ``late`` the bias is added last."""
    total = product(x1, x2)
    if x2_scale is None:
        return total if bias is None else total + bias.float()
    first, last = (None, bias) if late else (bias, None)
    total = total if first is None else total + first.double()
    of_rows = None if x1_scale is None else _of_rows(x1_scale, x1).reshape(x1.shape[:-1])
    y = dequantize(total, x2_scale.reshape(-1), None, of_rows, None, torch.float32)
    return y if last is None else y + last.float()


def _of_rows(scale: Tensor, x: Tensor) -> Tensor:
    """Returns a number for each row of x, from one for all or one for each."""
    return scale.reshape(-1).expand(x.shape[:-1].numel())


def _result_dtype(x: Tensor, scale: Tensor | None, asked: int | torch.dtype | None, argument: str) -> torch.dtype:
    if scale is None:
        same = dtype_of(asked, x.dtype, argument) == x.dtype
        expect(same, argument, asked, f"None or {x.dtype}, where there is no x2_scale")
        return x.dtype
    return dtype_of(asked, torch.float16 if scale.dtype == torch.int64 else torch.bfloat16, argument)


@operator("npu_all_gather_base_mm", ignores=_SPEED)
def all_gather_base_mm(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    bias: Tensor | None,
    x1_scale: Tensor | None,
    x2_scale: Tensor | None,
    gather_output: bool,
    output_dtype: int | None,
) -> tuple[Tensor, Tensor]:
    """Returns the rows of all ranks times x2, and those rows. Scales of the rows of ``input`` are also gathered."""
    group, dtype = groups.named(hcom, world_size), _result_dtype(input, x2_scale, output_dtype, "output_dtype")
    scales = {"x1_scale": x1_scale, "x2_scale": x2_scale}
    options = {"gather_output": gather_output}
    _checked(group, "npu_all_gather_base_mm", input, x2, dtype, input.size(-1), None, bias, scales, x1_scale, options)()
    rows = group.all_gather(input).flatten(0, 1)
    if x1_scale is not None:
        x1_scale = group.all_gather(_of_rows(x1_scale, input))
    y = _product(rows, x2, bias, x1_scale, x2_scale)
    return y.to(dtype), rows if gather_output else rows[:0]


@operator("npu_mm_reduce_scatter_base", ignores=_SPEED)
def mm_reduce_scatter_base(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    bias: Tensor | None,
    x1_scale: Tensor | None,
    x2_scale: Tensor | None,
    output_dtype: int | None,
) -> Tensor:
    """Adds up input @ x2, with each rank's bias, over the ranks; returns this rank's part of the rows."""
    group, dtype = groups.named(hcom, world_size), _result_dtype(input, x2_scale, output_dtype, "output_dtype")
    sizes, scales = (input.size(-1), input.size(0)), {"x1_scale": x1_scale, "x2_scale": x2_scale}
    agree = _checked(group, "npu_mm_reduce_scatter_base", input, x2, dtype, *sizes, bias, scales)
    y = _product(input, x2, bias, x1_scale, x2_scale)
    agree()
    return group.reduce_scatter(y).to(dtype)


@operator("npu_mm_all_reduce_base", ignores=_SPEED)
def mm_all_reduce_base(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    bias: Tensor | None,
    antiquant_scale: Tensor | None,
    antiquant_offset: Tensor | None,
    x3: Tensor | None,
    dequant_scale: Tensor | None,
    pertoken_scale: Tensor | None,
    comm_quant_scale_1: Tensor | None,
    comm_quant_scale_2: Tensor | None,
    antiquant_group_size: int,
) -> Tensor:
    """Adds up x1 @ x2 with its scales over the ranks, with each rank's bias and x3.

    Where both ``comm_quant_scale`` are given the terms travel as int8 in units of the first, and their sum in units of
    the second: the mode of two scales of `alltoallv.torch.quantized_all_reduce`.
    """
    group, (first, second) = groups.named(hcom), (comm_quant_scale_1, comm_quant_scale_2)
    expect((first is None) == (second is None), "comm_quant_scale_2", second, "a scale where comm_quant_scale_1 is one")
    for argument, value in (("antiquant_offset", antiquant_offset), ("antiquant_group_size", antiquant_group_size)):
        is_set = isinstance(value, Tensor) or bool(value)
        expect(antiquant_scale is not None or not is_set, argument, value, "none, where there is no antiquant_scale")
    if antiquant_scale is not None:
        x2 = antiquantize(x2, antiquant_scale, antiquant_offset, antiquant_group_size, x1.dtype)
    scales = {"pertoken_scale": pertoken_scale, "dequant_scale": dequant_scale}
    scales |= {"comm_quant_scale_1": first, "comm_quant_scale_2": second}
    dtype = x1.dtype
    if dequant_scale is not None:
        dtype = torch.bfloat16 if dequant_scale.dtype == torch.bfloat16 else torch.float16
    options = {"comm_quant_scale_1": _told(first), "comm_quant_scale_2": _told(second)}
    agree = _checked(group, "npu_mm_all_reduce_base", x1, x2, dtype, x1.size(-1), None, bias, scales, first, options)
    y = _product(x1.flatten(0, -2), x2, bias, pertoken_scale, dequant_scale)
    if x3 is not None:
        y = y + x3.float().reshape(y.shape)
    agree()
    if first is None or second is None:
        total = group.all_gather(y).sum(0)
    else:
        total = _two_scales(group, y.to(dtype), first, second)
    return total.to(dtype).view(*x1.shape[:-1], x2.size(1))


def _told(scale: Tensor | None) -> str:
    """Returns a text that is equal where the numbers of a scale are."""
    if scale is None:
        return "None"
    values = scale.detach().float().reshape(-1).tolist()
    return f"{values[:1]}, {len(values)} numbers with digest {zlib.crc32(repr(values).encode()):08x}"


def _two_scales(group: Group, y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Returns the quantized sum: the terms are int8 in units of ``first``, added exactly, then int8 in ``second``."""
    first_scale, second_scale = (scale.float().reshape(1, -1) for scale in (first, second))
    total = group.all_gather(to_int8(y.float() / first_scale)).int().sum(0)
    return to_int8(total * (first_scale / second_scale)) * second_scale


def _transposed(group: Group, x1: Tensor) -> Tensor:
    """Sends rank j part j of the (W * m, H) rows; returns this rank's m rows of all ranks side by side: (m, W * H)."""
    blocks = group.all_to_all(x1.unflatten(0, (group.size, -1)), [1] * group.size, [1] * group.size)
    return blocks.transpose(0, 1).flatten(1)


def _scattered(group: Group, y: Tensor) -> Tensor:
    """Sends rank j part j of the (m, W * n) columns; returns this rank's, one below the other: (W * m, n)."""
    blocks = y.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()
    return group.all_to_all(blocks, [1] * group.size, [1] * group.size).flatten(0, 1)


def _check_axes(axes: list[int] | None, expected: list[int]) -> None:
    expect(axes is None or list(axes) == expected, "all2all_axes", axes, f"{expected}")


def _check_modes(x1: int | None, x2: int | None, allowed: Mapping[int, str]) -> None:
    expect(x1 in allowed, "x1_quant_mode", x1, " or ".join(f"{mode} ({what})" for mode, what in allowed.items()))
    expect(x2 == _PER_CHANNEL, "x2_quant_mode", x2, "2 (scales of columns)")


def _all_to_all_matmul(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    all2all_out_flag: bool,
    bias: Tensor | None,
    x1_scale: Tensor | None,
    x2_scale: Tensor | None,
    x1_quant_mode: int | None,
    x2_quant_mode: int | None,
    all2all_axes: list[int] | None,
    y_dtype: int | None,
    quantized: bool,
    name: str,
) -> tuple[Tensor, Tensor]:
    _check_axes(all2all_axes, [-2, -1])
    if quantized:
        _check_modes(x1_quant_mode, x2_quant_mode, {_PER_TOKEN: "scales of rows", _DYNAMIC_PER_TOKEN: "made here"})
    exact = x1.is_floating_point() or not quantized
    dtype = dtype_of(y_dtype, x1.dtype if exact else torch.bfloat16, "y_dtype")
    group, dynamic = groups.named(hcom, world_size), x1_quant_mode == _DYNAMIC_PER_TOKEN
    sizes = x1.size(-1) * group.size, x1.size(0)
    scales = {"x1_scale": None if dynamic else x1_scale, "x2_scale": x2_scale}
    options = {"all2all_out_flag": all2all_out_flag, "x1_quant_mode": x1_quant_mode or 0}
    _checked(group, name, x1, x2, dtype, *sizes, bias, scales, options=options)()
    rows = arrived = _transposed(group, x1)
    if dynamic:
        rows, x1_scale = quantize_rows(arrived.float(), torch.int8)
    y = _product(rows, x2, bias, x1_scale, x2_scale, late=True).to(dtype)
    return y, arrived if all2all_out_flag else arrived[:0]


def _matmul_all_to_all(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    bias: Tensor | None,
    x1_scale: Tensor | None,
    x2_scale: Tensor | None,
    x1_quant_mode: int | None,
    x2_quant_mode: int | None,
    all2all_axes: list[int] | None,
    y_dtype: int | None,
    quantized: bool,
    name: str,
) -> Tensor:
    _check_axes(all2all_axes, [-1, -2])
    if quantized:
        _check_modes(x1_quant_mode, x2_quant_mode, {_PER_TOKEN: "scales of rows"})
    group, dtype = (
        groups.named(hcom, world_size),
        dtype_of(y_dtype, torch.bfloat16 if quantized else x1.dtype, "y_dtype"),
    )
    sizes, scales = (x1.size(-1), x2.size(-1)), {"x1_scale": x1_scale, "x2_scale": x2_scale}
    agree = _checked(group, name, x1, x2, dtype, *sizes, bias, scales)
    y = _product(x1, x2, bias, x1_scale, x2_scale, late=True).to(dtype)
    agree()
    return _scattered(group, y)


_MODE = ("comm_mode",)
_EXACT = {"quantized": False} | dict.fromkeys(("x1_scale", "x2_scale", "x1_quant_mode", "x2_quant_mode", "y_dtype"))
variant(
    _all_to_all_matmul,
    "npu_all_to_all_matmul",
    "Multiplies this rank's part of the rows of all ranks, side by side, by x2; returns it, and those rows.",
    _MODE,
    **_EXACT,
)
variant(
    _matmul_all_to_all,
    "npu_matmul_all_to_all",
    "Returns this rank's part of the columns of x1 @ x2 + bias of all ranks, one below the other.",
    _MODE,
    **_EXACT,
)
variant(
    _all_to_all_matmul,
    "npu_all_to_all_quant_matmul",
    """Computes npu_all_to_all_matmul of int8.

    The int8 numbers are given with scales of their rows, or made of the rows that arrive (mode 7).
    """,
    _MODE,
    quantized=True,
)
variant(
    _matmul_all_to_all,
    "npu_quant_matmul_all_to_all",
    "Computes npu_matmul_all_to_all of int8 with scales of x1's rows and x2's columns; the bias is added last.",
    _MODE,
    quantized=True,
)


# Experts' matrix products, fused with the exchange of their rows.


_PER_TENSOR = 1


def _checked_groups(
    group: Group, x: Tensor, weight: Tensor, sends: Sequence[int], recvs: Sequence[int], sent_width: int, scaled: bool
) -> groups.Values:
    """Raises for what the formula does not cover or the device refuses; returns what must be equal on all ranks.

    ``sent_width`` is the number of bytes of a row that travels; ``scaled`` is true if there are scales.
    """
    expect(x.dim() == 2, "gmm_x", x, "two dimensions")
    expect(weight.dim() == 3 and x.size(1) == weight.size(1), "gmm_weight", weight, f"(e, {x.size(1)}, N1)")
    check_dtypes("gmm_x", x, "gmm_weight", weight, scaled)
    each, count = weight.size(0), weight.size(0) * group.size
    for argument, counts in (("send_counts", sends), ("recv_counts", recvs)):
        expected = f"{count} numbers from 0 on, {each} for each rank"
        expect(len(counts) == count and min(counts, default=0) >= 0, argument, list(counts), expected)
    expect(x.size(0) == sum(sends), "gmm_x", x, f"{sum(sends)} rows, as many as send_counts says")
    nbytes = sum(sends) * sent_width
    limits.check(limits.GroupedMatmul(group.size, each, x.size(1), weight.size(2), nbytes).breaches)
    same: groups.Values = {"the number of experts of a rank": each, "H1": x.size(1), "N1": weight.size(2)}
    return same | {"the dtype of gmm_x": str(x.dtype)}


def _transposed_groups(rows: Tensor, counts: Sequence[int], inner: int) -> Tensor:
    """Returns rows that lie by (a, b) in the order (b, a); ``counts`` are by (a, b), with ``inner`` values of b."""
    parts = rows.split_with_sizes(list(counts))
    return torch.cat([part for b in range(inner) for part in parts[b::inner]])


def _products(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiplies rows that lie by expert by their weights, in float32; ``counts`` are by rank and expert."""
    parts = rows.split_with_sizes([sum(counts[expert :: len(weight)]) for expert in range(len(weight))])
    return torch.cat([product(part, matrix) for part, matrix in zip(parts, weight, strict=True)])


def _shared(
    x: Tensor | None, weight: Tensor | None, scales: Sequence[Tensor | None], transposed: bool, dtype: torch.dtype
) -> Tensor | None:
    """Returns the product of the shared expert's rows, if there are any, times its scales."""
    expect((x is None) == (weight is None), "mm_weight", weight, "a matrix exactly where mm_x is given")
    for argument, scale in zip(("mm_x_scale", "mm_weight_scale"), scales, strict=True):
        expect(x is not None or scale is None, argument, scale, "None, where there is no mm_x")
    if x is None or weight is None:
        return None
    expect(x.dim() == 2, "mm_x", x, "two dimensions")
    inner, axis = x.size(1), int(transposed)
    fits = weight.dim() == 2 and weight.size(axis) == inner
    expect(fits, "mm_weight", weight, f"a matrix of {inner} {'columns' if transposed else 'rows'}")
    return _scaled_groups(product(x, weight.t() if transposed else weight), scales).to(dtype)


def _scaled_groups(y: Tensor, scales: Sequence[Tensor | None]) -> Tensor:
    for scale in scales:
        y = y if scale is None else y.float() * scale.reshape(())
    return y


def _grouped_matmul(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    gmm_x_scale: Tensor | None,
    gmm_weight_scale: Tensor | None,
    hcom: str,
    ep_world_size: int,
    send_counts: list[int],
    recv_counts: list[int],
    gmm_y_dtype: int | None,
    mm_x: Tensor | None,
    mm_weight: Tensor | None,
    mm_x_scale: Tensor | None,
    mm_weight_scale: Tensor | None,
    gmm_x_quant_mode: int | None,
    gmm_weight_quant_mode: int | None,
    mm_x_quant_mode: int | None,
    mm_weight_quant_mode: int | None,
    trans_gmm_weight: bool,
    trans_mm_weight: bool,
    permute_out_flag: bool,
    mm_y_dtype: int | None,
    travels_first: bool,
    name: str,
) -> tuple[Tensor | None, ...]:
    """Multiplies the rows of this rank's experts after their exchange (``travels_first``) or before it."""
    modes = gmm_x_quant_mode, gmm_weight_quant_mode, mm_x_quant_mode, mm_weight_quant_mode
    scales = gmm_x_scale, gmm_weight_scale, mm_x_scale, mm_weight_scale
    for argument, mode, scale in zip(("gmm_x", "gmm_weight", "mm_x", "mm_weight"), modes, scales, strict=True):
        expect(mode in (None, _PER_TENSOR), f"{argument}_quant_mode", mode, "1 (one scale for the whole tensor)")
        expect(scale is None or scale.numel() == 1, f"{argument}_scale", scale, "one number")
    dtype = dtype_of(gmm_y_dtype, gmm_x.dtype, "gmm_y_dtype")
    default = dtype if gmm_x_scale is None else torch.bfloat16
    shared = _shared(mm_x, mm_weight, scales[2:], trans_mm_weight, dtype_of(mm_y_dtype, default, "mm_y_dtype"))
    weight, group = gmm_weight.mT if trans_gmm_weight else gmm_weight, groups.named(hcom, ep_world_size)
    travels = gmm_x.size(-1) * gmm_x.itemsize if travels_first else weight.size(-1) * dtype.itemsize
    same = _checked_groups(group, gmm_x, weight, send_counts, recv_counts, travels, gmm_weight_scale is not None)
    same |= {"the dtype of the result": str(dtype), "permute_out_flag": permute_out_flag}
    if travels_first:
        arrived = group.exchange_agreed(name, same, gmm_x, send_counts, recv_counts)
        rows = _transposed_groups(arrived, recv_counts, len(weight))
        y = _scaled_groups(_products(rows, weight, recv_counts), scales[:2]).to(dtype)
        return y, shared, rows if permute_out_flag else None
    y = _scaled_groups(_products(gmm_x, weight, send_counts), scales[:2]).to(dtype)
    by_expert = [count for expert in range(len(weight)) for count in send_counts[expert :: len(weight)]]
    leaving = _transposed_groups(y, by_expert, group.size)
    return group.exchange_agreed(name, same, leaving, send_counts, recv_counts), shared


_EXACT_GROUPS: dict[str, Any] = dict.fromkeys(
    [f"{name}_{what}" for name in ("gmm_x", "gmm_weight", "mm_x", "mm_weight") for what in ("scale", "quant_mode")]
    + ["gmm_y_dtype", "mm_y_dtype"]
)
_AS_GIVEN: dict[str, Any] = {"trans_gmm_weight": False, "trans_mm_weight": False}
_register = functools.partial(variant, _grouped_matmul, ignores=("comm_mode",))
_register(
    "npu_alltoallv_gmm",
    """Multiplies the rows that all ranks send to this rank's experts; returns that, the shared product, and the rows.

    Counts are by rank and then by expert, like the rows of ``gmm_x``; the results are by expert and then by rank.
    What nobody asks for is None.
    """,
    travels_first=True,
    **_EXACT_GROUPS,
)
_register(
    "npu_gmm_alltoallv",
    """Multiplies the rows of this rank's experts by their weights and sends them back to the ranks they came from.

    ``gmm_x`` is sorted by expert and then by rank; counts and result are by rank and then by expert.
    """,
    travels_first=False,
    permute_out_flag=False,
    **_EXACT_GROUPS,
)
_OF_SCALES = "Computes {} of quantized numbers, with one scale for each tensor."
_register("npu_alltoallv_quant_gmm", _OF_SCALES.format("npu_alltoallv_gmm"), travels_first=True, **_AS_GIVEN)
_register(
    "npu_quant_gmm_alltoallv",
    _OF_SCALES.format("npu_gmm_alltoallv"),
    travels_first=False,
    permute_out_flag=False,
    **_AS_GIVEN,
)
