"""The collectives of `alltoallv.torch.api.functions` as a graph has them: operators, and copies where they write.

Nothing here depends on values: what the arguments say is checked when the operators run. An operator of a graph is done
when the next one begins, so the handle of a call with ``async_op=True`` is that of one that has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alltoallv._calls.counts import Counts, Unit, even_split
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.torch.api import group as groups
from alltoallv.torch.api.group import Group
from alltoallv.torch.api.tensors import check_one_dtype, common_row_size, needs_grad, row_size
from alltoallv.torch.api.work import Done
from alltoallv.torch.graph import ops as ops


def all_to_all_v(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None,
    sdispls: Counts | None,
    rdispls: Counts | None,
    unit: Unit | None,
    out: Tensor | None,
    group: Group,
    async_op: bool,
) -> Any:
    if unit not in ("element", "row", None):
        raise InvalidParamError(f"unit is {unit!r}, expected 'element', 'row' or None")
    by_row = input.dim() > 1 if unit is None else unit == "row"
    row = row_size(input) if by_row else 1
    name = groups.name_of(group)
    sends = _counts(send_counts) * row
    sdispl = _displs(sdispls, sends, row)
    if recv_counts is None:
        if rdispls is not None or out is not None:
            raise InvalidParamError("recv_counts is None, expected counts with rdispls or out")
        made, _ = ops.all_to_all_v_learn(input, torch.stack([sends, sdispl]), row, "all_to_all_v", name)
    else:
        recvs = _counts(recv_counts) * row
        layout = torch.stack([sends, sdispl, recvs, _displs(rdispls, recvs, row)])
        if out is not None:
            if needs_grad(input):
                raise InvalidParamError("out is given for an input that requires grad, expected one or the other")
            if out.dtype != input.dtype:
                raise InvalidTensorError(f"out has dtype {out.dtype}, expected {input.dtype}", 13)
            if by_row and out.shape[1:] != input.shape[1:]:
                found, expected = tuple(out.shape[1:]), tuple(input.shape[1:])
                raise InvalidTensorError(f"out has rows of shape {found}, expected {expected}, those of the input")
            _write(out, input, layout, False, row, "all_to_all_v", name)
            return outcome(out, None, async_op)
        packed_list = rdispls is None and not isinstance(recv_counts, Tensor)
        numel = sum(recv_counts) * row if packed_list else -1
        made = ops.all_to_all_v(input, layout, numel, row, "all_to_all_v", name)
    made = made.view(-1, *input.shape[1:]) if by_row else made
    if async_op and recv_counts is None:
        return None, Done(made)
    return outcome(made, None, async_op)


def exchange_counts(send_counts: Counts, group: Group) -> Tensor:
    sends = _counts(send_counts)
    size = groups.world_size(group)
    layout = _packed(_counts([1] * size), _counts([1] * size))
    made: Tensor = ops.all_to_all_v(sends, layout, size, 1, "exchange_counts", groups.name_of(group))
    return made


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Counts | None,
    input_split_sizes: Counts | None,
    group: Group,
    async_op: bool,
) -> Done | None:
    check_one_dtype(output, input)
    row = common_row_size(output, input)
    size = groups.world_size(group)

    def elements(name: str, tensor: Tensor, sizes: Counts | None) -> Tensor:
        none = sizes is None or len(sizes) == 0
        return _counts(even_split(name, tensor.shape[0], size) if none else sizes) * row

    layout = _packed(elements("input", input, input_split_sizes), elements("output", output, output_split_sizes))
    _write(output, input, layout, True, max(row, 1), "all_to_all_single", groups.name_of(group))
    return Done(output) if async_op else None


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Group, async_op: bool) -> Done | None:
    check_one_dtype(*inputs, *outputs)
    sizes = [out.numel() for out in outputs]
    layout = _packed(_counts([x.numel() for x in inputs]), _counts(sizes))
    x = torch.cat([x.detach().reshape(-1) for x in inputs])
    made = ops.all_to_all_v(x, layout, sum(sizes), 1, "all_to_all", groups.name_of(group))
    for out, part in zip(outputs, made.split(sizes), strict=True):
        out.copy_(part.view(out.shape))
    return Done(list(outputs)) if async_op else None


def all_gather_into_tensor(output: Tensor, input: Tensor, group: Group, async_op: bool) -> Done | None:
    check_one_dtype(output, input)
    size = groups.world_size(group)
    each = _counts([input.numel()] * size)
    layout = torch.stack([each, torch.zeros_like(each), each, _displs(None, each, 1)])
    _write(output, input, layout, True, 1, "all_gather_into_tensor", groups.name_of(group))
    return Done(output) if async_op else None


def outcome(made: Tensor, out: Tensor | None, async_op: bool) -> Any:
    """What a call returns that was given these.

    Raises:
        InvalidTensorError: ``out`` is of another dtype or shape.
    """
    if out is not None:
        if (out.dtype, out.shape) != (made.dtype, made.shape):
            raise InvalidTensorError(
                f"the output has dtype {out.dtype} and shape {tuple(out.shape)}, "
                f"expected {made.dtype} and {tuple(made.shape)}"
            )
        out.copy_(made)
        made = out
    return (made, Done(made)) if async_op else made


def _write(output: Tensor, input: Tensor, layout: Tensor, whole: bool, row: int, operator: str, group: str) -> None:
    """An exchange without gradients into a tensor of the same dtype, whose gaps stay."""
    output.copy_(ops.all_to_all_v_over(output.detach(), input.detach(), layout, whole, row, operator, group))


def _counts(values: Counts) -> Tensor:
    if isinstance(values, Tensor):
        return values.to("cpu", torch.int64)
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _displs(values: Counts | None, counts: Tensor, row: int) -> Tensor:
    return counts.cumsum(0) - counts if values is None else _counts(values) * row


def _packed(sends: Tensor, recvs: Tensor) -> Tensor:
    """The layout of regions that follow each other."""
    return torch.stack([sends, _displs(None, sends, 1), recvs, _displs(None, recvs, 1)])
