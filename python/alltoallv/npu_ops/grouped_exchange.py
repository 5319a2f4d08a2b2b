"""Experts' matrix products fused with the exchange of their rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alltoallv.npu_ops import groups, limits
from alltoallv.npu_ops.groups import Group
from alltoallv.npu_ops.matmuls import check_dtypes, product
from alltoallv.npu_ops.registry import dtype_of, expect, variant

_PER_TENSOR = 1


def _checked(
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


def _transposed(rows: Tensor, counts: Sequence[int], inner: int) -> Tensor:
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
    return _scaled(product(x, weight.t() if transposed else weight), scales).to(dtype)


def _scaled(y: Tensor, scales: Sequence[Tensor | None]) -> Tensor:
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
    same = _checked(group, gmm_x, weight, send_counts, recv_counts, travels, gmm_weight_scale is not None)
    same |= {"the dtype of the result": str(dtype), "permute_out_flag": permute_out_flag}
    if travels_first:
        arrived = group.exchange_agreed(name, same, gmm_x, send_counts, recv_counts)
        rows = _transposed(arrived, recv_counts, len(weight))
        y = _scaled(_products(rows, weight, recv_counts), scales[:2]).to(dtype)
        return y, shared, rows if permute_out_flag else None
    y = _scaled(_products(gmm_x, weight, send_counts), scales[:2]).to(dtype)
    by_expert = [count for expert in range(len(weight)) for count in send_counts[expert :: len(weight)]]
    leaving = _transposed(y, by_expert, group.size)
    return group.exchange_agreed(name, same, leaving, send_counts, recv_counts), shared


_EXACT: dict[str, Any] = dict.fromkeys(
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
    **_EXACT,
)
_register(
    "npu_gmm_alltoallv",
    """Multiplies the rows of this rank's experts by their weights and sends them back to the ranks they came from.

    ``gmm_x`` is sorted by expert and then by rank; counts and result are by rank and then by expert.
    """,
    travels_first=False,
    permute_out_flag=False,
    **_EXACT,
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
