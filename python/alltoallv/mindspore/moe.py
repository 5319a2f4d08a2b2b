"""Paddle's global_scatter and global_gather on MindSpore tensors; the counts are those of `alltoallv.numpy.moe`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from mindspore import Tensor, ops

from alltoallv import _core
from alltoallv.communicator import Communicator
from alltoallv.counts import Counts, packed
from alltoallv.errors import InvalidParamError, PeerMismatchError
from alltoallv.guard import guard
from alltoallv.mindspore.exchange import all_to_all_v, enter
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import check_tensor

Matrix = npt.NDArray[np.int64]


def global_scatter(x: Tensor, local_count: Counts, global_count: Counts, group: Group = None) -> Tensor:
    """Sends every row to the card of its expert. Differentiable.

    Args:
        x: Rows sorted by card, then by expert: ``local_count[e + j * E]`` rows for expert e of card j.
            Shape ``[n, ...]``.
        local_count, global_count: ``W * E`` integers >= 0, entry ``e + j * E`` standing for expert e and card j: rows
            that go from here to expert e of card j, and rows that come from card j for expert e of this card.
        group: See `alltoallv.mindspore`.

    Returns:
        Shape ``[sum(global_count), ...]``, rows sorted by this card's expert, then by the card they come from.

    Raises:
        As `alltoallv.mindspore.all_to_all_v`; PeerMismatchError also when two cards disagree about one expert's rows.
    """
    comm = enter(group)
    local, global_ = _checked("global_scatter", comm, x, local_count, global_count, "local_count")
    received = all_to_all_v(x, local.sum(1), global_.sum(1), unit="row", group=comm)
    return _transposed(received, global_)


def global_gather(x: Tensor, local_count: Counts, global_count: Counts, group: Group = None) -> Tensor:
    """The inverse of `global_scatter`: brings the rows back to the cards that sent them. Differentiable.

    Args:
        x: Rows sorted by this card's expert, then by card. Shape ``[sum(global_count), ...]``.
        local_count, global_count: Those of `global_scatter`.
        group: See `alltoallv.mindspore`.

    Returns:
        Shape ``[sum(local_count), ...]``, rows sorted by the card they come from, then by that card's expert.
    """
    comm = enter(group)
    local, global_ = _checked("global_gather", comm, x, local_count, global_count, "global_count")
    by_card = _transposed(x, global_.T)
    return all_to_all_v(by_card, global_.sum(1), local.sum(1), unit="row", group=comm)


def _checked(
    operator: str, comm: Communicator, x: Tensor, local_count: Counts, global_count: Counts, rows_of_x: str
) -> tuple[Matrix, Matrix]:
    """The counts as [card, expert] matrices, on which all cards agree expert by expert."""
    matrices = {}
    with guard(comm, operator):
        check_tensor("x", x)
        for name, counts in (("local_count", local_count), ("global_count", global_count)):
            array = counts.asnumpy() if isinstance(counts, Tensor) else np.asarray(counts)
            if array.ndim != 1 or array.dtype.kind not in "iu" or array.size % comm.size or not array.size:
                raise InvalidParamError(
                    f"{name} has dtype {array.dtype} and shape {array.shape}, expected integers, "
                    f"{comm.size} cards times the number of experts"
                )
            if (array < 0).any():
                raise InvalidParamError(f"{name} is {array.tolist()}, expected entries >= 0")
            matrices[name] = np.ascontiguousarray(array, np.int64).reshape(comm.size, -1)
        local, global_ = matrices["local_count"], matrices["global_count"]
        if local.shape != global_.shape:
            raise InvalidParamError(
                f"local_count has {local.size} entries and global_count {global_.size}, expected one length"
            )
        total = int(matrices[rows_of_x].sum())
        if len(x.shape) == 0 or total != x.shape[0]:
            raise InvalidParamError(f"{rows_of_x} sums to {total}, expected the rows of x, of shape {tuple(x.shape)}")
        told = np.empty_like(global_)
        experts = [local.shape[1]] * comm.size
        places = packed(experts)
        plan = _core.Plan(comm.core, "exchange_counts", "int64", experts, places, experts, places)
    plan.run(local.ctypes.data, told.ctypes.data)
    with guard(comm, operator):
        for card, expert in np.argwhere(told != global_):
            raise PeerMismatchError(
                f"rank {card} sends {told[card, expert]} rows to expert {expert} of rank {comm.rank}, "
                f"which expects {global_[card, expert]}"
            )
    return local, global_


def _transposed(rows: Tensor, counts: Matrix) -> Tensor:
    """Rows sorted by (i, k), with ``counts[i, k]`` of each, sorted by (k, i) instead."""
    if 1 in counts.shape or rows.size == 0:
        return rows
    begin = np.concatenate(([0], np.cumsum(counts)))
    block = np.arange(counts.size).reshape(counts.shape).T.ravel()
    order = np.concatenate([np.arange(begin[b], begin[b + 1]) for b in block])
    return ops.gather(rows, Tensor(order.astype(np.int64)), 0)
