"""Multiplies experts' rows before or after their exchange, and a shared expert's rows beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alltoallv.npu_ops import groups, limits
from alltoallv.npu_ops.groups import Group
from alltoallv.npu_ops.matmuls import product
from alltoallv.npu_ops.registry import dtype_of, expect, operator

_PER_TENSOR = 1
_QUANTIZED = ("gmm_x", "gmm_weight", "mm_x", "mm_weight")


class _Route(NamedTuple):
    """Where rows go: counts by rank and expert, among the ranks of a group of HCCL's."""

    hcom: str
    world_size: int
    sends: Sequence[int]
    recvs: Sequence[int]


def _checked(
    group: Group, x: Tensor, weight: Tensor, sends: Sequence[int], recvs: Sequence[int], sent_width: int
) -> dict[str, int]:
    """Raises for what the formula does not cover or the device refuses; returns what must be equal on all ranks.

    ``sent_width`` is the number of bytes of a row that travels.
    """
    expect(x.dim() == 2, "gmm_x", x, "two dimensions")
    expect(weight.dim() == 3 and x.size(1) == weight.size(1), "gmm_weight", weight, f"(e, {x.size(1)}, N1)")
    each, count = weight.size(0), weight.size(0) * group.size
    for argument, counts in (("send_counts", sends), ("recv_counts", recvs)):
        expected = f"{count} numbers from 0 on, {each} for each rank"
        expect(len(counts) == count and min(counts, default=0) >= 0, argument, list(counts), expected)
    expect(x.size(0) == sum(sends), "gmm_x", x, f"{sum(sends)} rows, as many as send_counts says")
    nbytes = sum(sends) * sent_width
    limits.check(limits.GroupedMatmul(group.size, each, x.size(1), weight.size(2), nbytes).breaches)
    return {"the number of experts of a rank": each, "H1": x.size(1), "N1": weight.size(2)}


def _transposed(rows: Tensor, counts: Sequence[int], inner: int) -> Tensor:
    """Returns rows that lie by (a, b) in the order (b, a); ``counts`` are by (a, b), with ``inner`` values of b."""
    parts = rows.split_with_sizes(list(counts))
    return torch.cat([part for b in range(inner) for part in parts[b::inner]])


def _products(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiplies rows that lie by expert by their weights, in float32; ``counts`` are by rank and expert."""
    parts = rows.split_with_sizes([sum(counts[expert :: len(weight)]) for expert in range(len(weight))])
    return torch.cat([product(part, matrix) for part, matrix in zip(parts, weight, strict=True)])


def _shared(mm_x: Tensor | None, mm_weight: Tensor | None, transposed: bool = False) -> Tensor:
    expect((mm_x is None) == (mm_weight is None), "mm_weight", mm_weight, "a matrix exactly where mm_x is given")
    if mm_x is None or mm_weight is None:
        return torch.zeros(0)
    expect(mm_x.dim() == 2, "mm_x", mm_x, "two dimensions")
    inner, axis = mm_x.size(1), int(transposed)
    fits = mm_weight.dim() == 2 and mm_weight.size(axis) == inner
    expect(fits, "mm_weight", mm_weight, f"a matrix of {inner} {'columns' if transposed else 'rows'}")
    return product(mm_x, mm_weight.t() if transposed else mm_weight)


def _to_experts(name: str, x: Tensor, weight: Tensor, route: _Route) -> tuple[Tensor, Tensor]:
    """Sends rows to their experts; returns the rows of this rank's experts, by expert, and them times their weights."""
    hcom, world_size, sends, recvs = route
    group = groups.named(hcom, world_size)
    same = _checked(group, x, weight, sends, recvs, x.size(-1) * x.itemsize)
    rows = _transposed(group.exchange_agreed(name, same, x, sends, recvs), recvs, len(weight))
    return rows, _products(rows, weight, recvs)


def _to_ranks(
    name: str, x: Tensor, weight: Tensor, route: _Route, dtype: torch.dtype, scales: Sequence[Tensor] = ()
) -> Tensor:
    """Multiplies the rows of this rank's experts by weights and scales; sends them back, by rank and expert."""
    hcom, world_size, sends, recvs = route
    group, experts = groups.named(hcom, world_size), len(weight)
    same = _checked(group, x, weight, sends, recvs, weight.size(-1) * dtype.itemsize)
    y = _products(x, weight, sends)
    for scale in scales:
        y = y.float() * scale.reshape(())
    by_expert = [count for expert in range(experts) for count in sends[expert::experts]]
    return group.exchange_agreed(name, same, _transposed(y.to(dtype), by_expert, group.size), sends, recvs)


@operator("npu_alltoallv_gmm", ignores=("comm_mode",))
def alltoallv_gmm(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: list[int],
    recv_counts: list[int],
    mm_x: Tensor | None,
    mm_weight: Tensor | None,
    trans_gmm_weight: bool,
    trans_mm_weight: bool,
    permute_out_flag: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies the rows that all ranks send to this rank's experts; returns that, the shared product, and the rows.

    Counts are by rank and then by expert, like the rows of ``gmm_x``; the results are by expert and then by rank.
    """
    shared = _shared(mm_x, mm_weight, trans_mm_weight).to(gmm_x.dtype)
    weight = gmm_weight.mT if trans_gmm_weight else gmm_weight
    route = _Route(hcom, ep_world_size, send_counts, recv_counts)
    rows, y = _to_experts("npu_alltoallv_gmm", gmm_x, weight, route)
    return y.to(gmm_x.dtype), shared, rows if permute_out_flag else rows[:0]


@operator("npu_gmm_alltoallv", ignores=("comm_mode",))
def gmm_alltoallv(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: list[int],
    recv_counts: list[int],
    mm_x: Tensor | None,
    mm_weight: Tensor | None,
    trans_gmm_weight: bool,
    trans_mm_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Multiplies the rows of this rank's experts by their weights and sends them back to the ranks they came from.

    ``gmm_x`` is sorted by expert and then by rank; counts and result are by rank and then by expert.
    """
    shared = _shared(mm_x, mm_weight, trans_mm_weight).to(gmm_x.dtype)
    weight = gmm_weight.mT if trans_gmm_weight else gmm_weight
    route = _Route(hcom, ep_world_size, send_counts, recv_counts)
    return _to_ranks("npu_gmm_alltoallv", gmm_x, weight, route, gmm_x.dtype), shared


def _check_modes(modes: Sequence[int | None], scales: Sequence[Tensor | None]) -> None:
    for name, mode, scale in zip(_QUANTIZED, modes, scales, strict=True):
        expect(mode in (None, _PER_TENSOR), f"{name}_quant_mode", mode, "1 (one scale for the whole tensor)")
        expect(scale is None or scale.numel() == 1, f"{name}_scale", scale, "one number")


@operator("npu_alltoallv_quant_gmm", ignores=("comm_mode",))
def alltoallv_quant_gmm(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    gmm_x_scale: Tensor,
    gmm_weight_scale: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: list[int],
    recv_counts: list[int],
    gmm_y_dtype: int,
    mm_x: Tensor | None,
    mm_weight: Tensor | None,
    mm_x_scale: Tensor | None,
    mm_weight_scale: Tensor | None,
    gmm_x_quant_mode: int | None,
    gmm_weight_quant_mode: int | None,
    mm_x_quant_mode: int | None,
    mm_weight_quant_mode: int | None,
    permute_out_flag: bool,
    mm_y_dtype: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes npu_alltoallv_gmm of quantized numbers, with one scale for each tensor."""
    modes = gmm_x_quant_mode, gmm_weight_quant_mode, mm_x_quant_mode, mm_weight_quant_mode
    _check_modes(modes, (gmm_x_scale, gmm_weight_scale, mm_x_scale, mm_weight_scale))
    dtype = dtype_of(gmm_y_dtype, torch.bfloat16, "gmm_y_dtype")
    shared = _quantized_shared(mm_x, mm_weight, mm_x_scale, mm_weight_scale, mm_y_dtype)
    route = _Route(hcom, ep_world_size, send_counts, recv_counts)
    rows, y = _to_experts("npu_alltoallv_quant_gmm", gmm_x, gmm_weight, route)
    y = y.float() * gmm_x_scale.reshape(()) * gmm_weight_scale.reshape(())
    return y.to(dtype), shared, rows if permute_out_flag else rows[:0]


def _quantized_shared(
    x: Tensor | None, weight: Tensor | None, x_scale: Tensor | None, weight_scale: Tensor | None, dtype: int | None
) -> Tensor:
    y = _shared(x, weight).float()
    for scale in (x_scale, weight_scale):
        y = y if scale is None else y * scale
    return y.to(dtype_of(dtype, torch.bfloat16, "mm_y_dtype"))


@operator("npu_quant_gmm_alltoallv", ignores=("comm_mode",))
def quant_gmm_alltoallv(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    gmm_x_scale: Tensor,
    gmm_weight_scale: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: list[int],
    recv_counts: list[int],
    gmm_y_dtype: int,
    mm_x: Tensor | None,
    mm_weight: Tensor | None,
    mm_x_scale: Tensor | None,
    mm_weight_scale: Tensor | None,
    gmm_x_quant_mode: int | None,
    gmm_weight_quant_mode: int | None,
    mm_x_quant_mode: int | None,
    mm_weight_quant_mode: int | None,
    mm_y_dtype: int | None,
) -> tuple[Tensor, Tensor]:
    """Computes npu_gmm_alltoallv of quantized numbers, with one scale for each tensor."""
    modes = gmm_x_quant_mode, gmm_weight_quant_mode, mm_x_quant_mode, mm_weight_quant_mode
    _check_modes(modes, (gmm_x_scale, gmm_weight_scale, mm_x_scale, mm_weight_scale))
    dtype = dtype_of(gmm_y_dtype, torch.bfloat16, "gmm_y_dtype")
    shared = _quantized_shared(mm_x, mm_weight, mm_x_scale, mm_weight_scale, mm_y_dtype)
    route, scales = _Route(hcom, ep_world_size, send_counts, recv_counts), (gmm_x_scale, gmm_weight_scale)
    return _to_ranks("npu_quant_gmm_alltoallv", gmm_x, gmm_weight, route, dtype, scales), shared
