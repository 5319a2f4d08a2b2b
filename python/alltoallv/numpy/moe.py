"""Exchange of tokens between mixture-of-experts ranks, with the meaning of Paddle's global_scatter and global_gather.

Each of W cards has E experts. ``local_count`` and ``global_count`` have W * E entries, entry ``e + j * E`` standing for
expert e of card j: ``local_count[e + j * E]`` rows of this card belong to expert e of card j, and
``global_count[e + j * E]`` rows of card j belong to expert e of this card.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv.communicator import Communicator
from alltoallv.counts import Counts, packed
from alltoallv.dtypes import core_name
from alltoallv.errors import InvalidParamError, PeerMismatchError
from alltoallv.guard import guard
from alltoallv.memory import empty
from alltoallv.numpy.arrays import Array, address, as_input, resolve, row_size


def global_scatter(
    x: npt.ArrayLike, local_count: Counts, global_count: Counts, group: Communicator | None = None
) -> Array:
    """Sends every row to the card of its expert.

    Args:
        x: Rows sorted by card, then by expert: ``local_count[e + j * E]`` rows for expert e of card j. Shape
            ``[n, ...]``.
        local_count, global_count: See the module; integers >= 0.

    Returns:
        Shape ``[sum(global_count), ...]``, rows sorted by this card's expert, then by the card they come from.

    Raises:
        As `alltoallv.numpy.all_to_all_v`; PeerMismatchError also when two cards disagree about one expert's rows.
    """
    comm = resolve(group)
    with guard(comm, "global_scatter"):
        x, local, global_ = _checked(x, local_count, global_count, comm)
        _check_rows("local_count", local, x)
    _compare(comm, "global_scatter", local, global_)
    with guard(comm, "global_scatter"):
        # What arrives is sorted by card; the experts want it sorted by expert.
        received = empty((int(global_.sum()), *x.shape[1:]), x.dtype)
        plan = _plan(comm, "global_scatter", x, local.sum(axis=1), global_.sum(axis=1))
    plan.run(address(x), address(received))
    return _transposed(received, global_)


def global_gather(
    x: npt.ArrayLike, local_count: Counts, global_count: Counts, group: Communicator | None = None
) -> Array:
    """The inverse of `global_scatter`: brings the rows back to the cards that sent them.

    Args:
        x: Rows sorted by this card's expert, then by card: ``global_count[e + j * E]`` rows. Shape ``[n, ...]``.
        local_count, global_count: Those of `global_scatter`.

    Returns:
        Shape ``[sum(local_count), ...]``, rows sorted by the card they come from, then by that card's expert.

    Raises:
        As `global_scatter`.
    """
    comm = resolve(group)
    with guard(comm, "global_gather"):
        x, local, global_ = _checked(x, local_count, global_count, comm)
        _check_rows("global_count", global_, x)
    _compare(comm, "global_gather", local, global_)
    with guard(comm, "global_gather"):
        by_card = _transposed(x, global_.T)
        received = empty((int(local.sum()), *x.shape[1:]), x.dtype)
        plan = _plan(comm, "global_gather", x, global_.sum(axis=1), local.sum(axis=1))
    plan.run(address(by_card), address(received))
    return received


def _checked(
    x: npt.ArrayLike, local_count: Counts, global_count: Counts, comm: Communicator
) -> tuple[Array, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The counts as [card, expert] matrices."""
    matrices = []
    for name, counts in (("local_count", local_count), ("global_count", global_count)):
        array = as_input(name, counts)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or array.size % comm.size or not array.size:
            raise InvalidParamError(
                f"{name} has dtype {array.dtype} and shape {array.shape}, expected integers, "
                f"{comm.size} cards times the number of experts"
            )
        if (array < 0).any():
            raise InvalidParamError(f"{name} is {array.tolist()}, expected entries >= 0")
        matrices.append(array.astype(np.int64).reshape(comm.size, -1))
    local, global_ = matrices
    if local.shape != global_.shape:
        raise InvalidParamError(
            f"local_count has {local.size} entries and global_count {global_.size}, expected one length"
        )
    x = as_input("x", x)
    core_name(x.dtype)
    row_size(x)
    return x, local, global_


def _check_rows(name: str, counts: npt.NDArray[np.int64], x: Array) -> None:
    if int(counts.sum()) != x.shape[0]:
        raise InvalidParamError(f"{name} sums to {int(counts.sum())}, expected {x.shape[0]}, the rows of x")


def _compare(comm: Communicator, operator: str, local: npt.NDArray[np.int64], global_: npt.NDArray[np.int64]) -> None:
    """The exchange itself compares sums per card only; wrong counts of single experts would mix up rows."""
    told = np.empty_like(global_)
    experts = [local.shape[1]] * comm.size
    plan = _core.Plan(comm.core, "exchange_counts", "int64", experts, packed(experts), experts, packed(experts))
    plan.run(address(np.ascontiguousarray(local)), address(told))
    with guard(comm, operator):
        for card, expert in np.argwhere(told != global_):
            raise PeerMismatchError(
                f"rank {card} sends {told[card, expert]} rows to expert {expert} of rank {comm.rank}, "
                f"which expects {global_[card, expert]}"
            )


def _plan(
    comm: Communicator, operator: str, x: Array, sends: npt.NDArray[np.int64], recvs: npt.NDArray[np.int64]
) -> _core.Plan:
    row = row_size(x)
    send, recv = (sends * row).tolist(), (recvs * row).tolist()
    return _core.Plan(comm.core, operator, core_name(x.dtype), send, packed(send), recv, packed(recv), 0, max(row, 1))


def _transposed(rows: Array, counts: npt.NDArray[np.int64]) -> Array:
    """Rows sorted by (i, k), with ``counts[i, k]`` of each, sorted by (k, i) instead."""
    if 1 in counts.shape:
        return rows
    begin = np.concatenate(([0], np.cumsum(counts)))
    block = np.arange(counts.size).reshape(counts.shape).T.ravel()
    order = np.concatenate([np.arange(begin[b], begin[b + 1]) for b in block])
    return np.asarray(rows[order])
