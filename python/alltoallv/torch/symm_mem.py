"""torch's symmetric-memory exchanges with counts in tensors, on CPU; imported, they are there::

    import alltoallv.torch.symm_mem
    import torch.distributed._symmetric_memory as symm_mem

    x = symm_mem.empty(1024, 64, device="cpu")
    torch.ops.symm_mem.all_to_all_vdev(x, out, in_splits, out_splits_offsets, group.group_name)

`torch.distributed._symmetric_memory.empty` gives CPU tensors of the shared arena, without a rendezvous; a plain tensor
also serves. Splits and offsets are int64 and count rows of dimension 0. ``input`` and ``out`` may be longer than what
travels; rows of ``out`` that nothing arrives in keep their values. All raise as `alltoallv.torch.all_to_all_v`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.torch.api.distributed import all_to_all_single
from alltoallv.torch.api.functions import all_to_all_v
from alltoallv.torch.eager.group import AnyCommunicator, from_group
from alltoallv.torch.eager.tensors import empty as in_arena

_FIRST = "all_to_all_single"  # the operator that brings the counts of all


def all_to_all_vdev(input: Tensor, out: Tensor, in_splits: Tensor, out_splits_offsets: Tensor, group_name: str) -> None:
    """Sends ``in_splits[j]`` rows to rank j; writes rows and offsets per sender to ``out_splits_offsets`` [2, W]."""
    comm = _communicator(group_name)
    with guard(comm, _FIRST):
        _check("in_splits", in_splits, (comm.size,))
        _check("out_splits_offsets", out_splits_offsets, (2, comm.size))
    splits = _exchanged(in_splits, comm)
    all_to_all_v(_sent(input, in_splits), in_splits, splits, unit="row", out=out, group=comm)
    out_splits_offsets.copy_(torch.stack([splits, _offsets(splits)]))


def all_to_all_vdev_2d(
    input: Tensor,
    out: Tensor,
    in_splits: Tensor,
    out_splits_offsets: Tensor,
    group_name: str,
    major_align: int | None = None,
) -> None:
    """Sends rows to experts, of which every rank has E.

    ``in_splits`` [W * E] is sorted by rank, then by expert; ``out`` and ``out_splits_offsets`` [2, W * E] by expert,
    then by the rank that the rows come from. The rows of an expert begin at a multiple of ``major_align``, and take at
    least that many.
    """
    comm = _communicator(group_name)
    align = 1 if major_align is None else major_align
    with guard(comm, _FIRST):
        if align < 1:
            raise InvalidParamError(f"major_align is {align}, expected at least 1")
        matrix = _by_rank("in_splits", in_splits, in_splits.shape, comm)
        _check("out_splits_offsets", out_splits_offsets, (2, matrix.numel()))
    received = _exchanged(matrix, comm)  # [from, expert]
    splits = received.T.reshape(-1)
    rows = received.sum(0)
    firsts = _offsets(torch.clamp((rows + align - 1) // align, min=1) * align)
    offsets = (_offsets(received.T, 1) + firsts[:, None]).reshape(-1)
    packed = all_to_all_v(_sent(input, matrix), matrix.sum(1), received.sum(1), unit="row", group=comm)
    if len(packed):
        out.index_copy_(0, _rows(offsets.view(-1, comm.size).T.reshape(-1), received.reshape(-1)), packed)
    out_splits_offsets.copy_(torch.stack([splits, offsets]))


def all_to_all_vdev_2d_offset(
    input: Tensor, out: Tensor, in_splits_offsets: Tensor, out_splits_offsets: Tensor, group_name: str
) -> None:
    """Brings rows back; ``in_splits_offsets`` is the output of `all_to_all_vdev_2d`, and rows between regions stay.

    ``out`` and ``out_splits_offsets`` [2, W * E] are packed and sorted by rank, then by expert.
    """
    comm = _communicator(group_name)
    with guard(comm, _FIRST):
        shape = in_splits_offsets.shape[1:]
        _check("in_splits_offsets", in_splits_offsets, (2, *shape))
        matrix, offsets = (_by_expert(row, shape, comm) for row in in_splits_offsets)
        _check("out_splits_offsets", out_splits_offsets, (2, matrix.numel()))
        packed = input.index_select(0, _rows(offsets.reshape(-1), matrix.reshape(-1)))
    received = _exchanged(matrix, comm)
    all_to_all_v(packed, matrix.sum(1), received.sum(1), unit="row", out=out, group=comm)
    splits = received.reshape(-1)
    out_splits_offsets.copy_(torch.stack([splits, _offsets(splits)]))


def _communicator(group_name: str) -> AnyCommunicator:
    return from_group(_resolve_process_group(group_name))  # type: ignore[arg-type]


def _check(name: str, splits: Tensor, shape: Sequence[int]) -> None:
    if splits.dtype != torch.int64 or tuple(splits.shape) != tuple(shape):
        shown = f"{splits.dtype} of shape {tuple(splits.shape)}"
        raise InvalidTensorError(f"{name} is {shown}, expected torch.int64 of shape {tuple(shape)}")


def _by_rank(name: str, splits: Tensor, shape: Sequence[int], comm: AnyCommunicator) -> Tensor:
    """Returns the splits as [W, E]; raises InvalidTensorError if W does not divide them."""
    if len(shape) != 1 or shape[0] % comm.size:
        raise InvalidTensorError(f"{name} has shape {tuple(splits.shape)}, expected a multiple of {comm.size} splits")
    _check(name, splits, shape)
    return splits.view(comm.size, -1)


def _by_expert(splits: Tensor, shape: Sequence[int], comm: AnyCommunicator) -> Tensor:
    return _by_rank("in_splits_offsets", splits, shape, comm).view(-1, comm.size).T.contiguous()


def _exchanged(splits: Tensor, comm: AnyCommunicator) -> Tensor:
    received = torch.empty_like(splits)
    all_to_all_single(received, splits, group=comm)
    return received


def _sent(input: Tensor, splits: Tensor) -> Tensor:
    """Returns the rows that are sent; torch's buffers may be larger."""
    return input[: int(splits.sum())]


def _offsets(splits: Tensor, dim: int = 0) -> Tensor:
    return splits.cumsum(dim) - splits


def _rows(offsets: Tensor, splits: Tensor) -> Tensor:
    """Returns the indices of the rows of regions that begin at ``offsets``."""
    starts = torch.repeat_interleave(offsets - _offsets(splits), splits)
    return starts + torch.arange(len(starts))


@functools.wraps(symmetric.empty)
def _empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    if torch.device(device or torch.get_default_device()).type != "cpu":
        return _of_torch(*size, dtype=dtype, device=device)
    return in_arena(size[0] if len(size) == 1 else size, dtype)


_of_torch = symmetric.empty
symmetric.empty = _empty
_library = torch.library.Library("symm_mem", "IMPL")
for _function in (all_to_all_vdev, all_to_all_vdev_2d, all_to_all_vdev_2d_offset):
    _library.impl(_function.__name__, _function, "CPU")
