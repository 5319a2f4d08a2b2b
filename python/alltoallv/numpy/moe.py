"""Exchange of tokens between mixture-of-experts ranks; the counts are those of `alltoallv._calls.experts`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls import experts
from alltoallv._calls.counts import Counts, packed
from alltoallv._calls.experts import Matrix
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name
from alltoallv.memory import empty
from alltoallv.numpy.arrays import Array, address, as_input, resolve, row_size


def global_scatter(
    x: npt.ArrayLike, local_count: Counts, global_count: Counts, group: Communicator | None = None
) -> Array:
    """Sends every row to the card of its expert.

    Args:
        x: Rows sorted by card, then by expert: ``local_count[e + j * E]`` rows for expert e of card j. Shape
            ``[n, ...]``.
        local_count, global_count: See `alltoallv._calls.experts`; integers >= 0.

    Returns:
        Shape ``[sum(global_count), ...]``, rows sorted by this card's expert, then by the card they come from.

    Raises:
        As `alltoallv.numpy.all_to_all_v`; PeerMismatchError also when two cards disagree about one expert's rows.
    """
    comm = resolve(group)
    x, local, global_ = _checked("global_scatter", comm, x, local_count, global_count, "local_count")
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
    x, local, global_ = _checked("global_gather", comm, x, local_count, global_count, "global_count")
    with guard(comm, "global_gather"):
        by_card = _transposed(x, global_.T)
        received = empty((int(local.sum()), *x.shape[1:]), x.dtype)
        plan = _plan(comm, "global_gather", x, global_.sum(axis=1), local.sum(axis=1))
    plan.run(address(by_card), address(received))
    return received


def _checked(
    operator: str, comm: Communicator, x: npt.ArrayLike, local_count: Counts, global_count: Counts, rows_of_x: str
) -> tuple[Array, Matrix, Matrix]:
    with guard(comm, operator):
        x = as_input("x", x)
        core_name(x.dtype)
        local, global_ = experts.read(comm.size, x.shape, local_count, global_count, rows_of_x)
    experts.agree(comm, operator, local, global_)
    return x, local, global_


def _plan(
    comm: Communicator, operator: str, x: Array, sends: npt.NDArray[np.int64], recvs: npt.NDArray[np.int64]
) -> _core.Plan:
    row = row_size(x)
    send, recv = (sends * row).tolist(), (recvs * row).tolist()
    return _core.Plan(comm.core, operator, core_name(x.dtype), send, packed(send), recv, packed(recv), 0, max(row, 1))


def _transposed(rows: Array, counts: Matrix) -> Array:
    order = experts.transposition(counts)
    return rows if order is None else np.asarray(rows[order])
