"""Paddle's global_scatter and global_gather on MindSpore tensors; `alltoallv._calls.experts` has the counts."""

from __future__ import annotations

from mindspore import Tensor, ops

from alltoallv._calls import experts
from alltoallv._calls.counts import Counts
from alltoallv._calls.experts import Matrix
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.mindspore.exchange import all_to_all_v, enter
from alltoallv.mindspore.group import Group, on_host
from alltoallv.mindspore.tensors import check_tensor


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
    with guard(comm, operator):
        check_tensor("x", x)
        local, global_ = experts.read(comm.size, x.shape, local_count, global_count, rows_of_x)
    experts.agree(on_host(comm), operator, local, global_)
    return local, global_


def _transposed(rows: Tensor, counts: Matrix) -> Tensor:
    order = None if rows.size == 0 else experts.transposition(counts)
    return rows if order is None else ops.gather(rows, Tensor(order), 0)
