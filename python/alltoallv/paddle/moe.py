"""Paddle's global_scatter and global_gather; the counts are those of `alltoallv._calls.experts`."""

from __future__ import annotations

import paddle
from paddle import Tensor

from alltoallv._calls import experts
from alltoallv._calls.counts import Counts
from alltoallv._calls.experts import Matrix
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidTensorError
from alltoallv.paddle.autograd import Permute
from alltoallv.paddle.exchange import all_to_all_v
from alltoallv.paddle.group import Group, resolve
from alltoallv.paddle.tensors import check_tensor, core_name


def global_scatter(
    x: Tensor, local_count: Counts, global_count: Counts, group: Group = None, use_calc_stream: bool = True
) -> Tensor:
    """Sends every row to the card of its expert. Signature and meaning of Paddle's function; differentiable.

    Args:
        x: Rows sorted by card, then by expert: ``local_count[e + j * E]`` rows for expert e of card j.
            Shape ``[n, ...]``, any dtype; Paddle itself takes two dimensions.
        local_count, global_count: int64 tensors of ``W * E`` entries >= 0, entry ``e + j * E`` standing for expert e
            and card j: rows that go from here to expert e of card j, and rows that come from card j for expert e of
            this card. Lists of int serve too.
        use_calc_stream: Without a meaning on CPU.

    Returns:
        Shape ``[sum(global_count), ...]``, rows sorted by this card's expert, then by the card they come from.

    Raises:
        InvalidTensorError: counts of another dtype, with Paddle's words.
        PeerMismatchError: two cards disagree about one expert's rows.
        Otherwise as `alltoallv.paddle.all_to_all_v`.
    """
    comm = resolve(group)
    if comm is None:
        return None
    local, global_ = _checked("global_scatter", comm, x, local_count, global_count, "local_count")
    received = all_to_all_v(x, local.sum(1), global_.sum(1), unit="row", group=comm)
    return _transposed(received, global_)


def global_gather(
    x: Tensor, local_count: Counts, global_count: Counts, group: Group = None, use_calc_stream: bool = True
) -> Tensor:
    """The inverse of `global_scatter`: brings the rows back to the cards that sent them. Differentiable.

    Args:
        x: Rows sorted by this card's expert, then by card. Shape ``[sum(global_count), ...]``.
        local_count, global_count, use_calc_stream: Those of `global_scatter`.

    Returns:
        Shape ``[sum(local_count), ...]``, rows sorted by the card they come from, then by that card's expert.

    Raises:
        As `global_scatter`.
    """
    comm = resolve(group)
    if comm is None:
        return None
    local, global_ = _checked("global_gather", comm, x, local_count, global_count, "global_count")
    by_card = _transposed(x, global_.T)
    return all_to_all_v(by_card, global_.sum(1), local.sum(1), unit="row", group=comm)


def _checked(
    operator: str, comm: Communicator, x: Tensor, local_count: Counts, global_count: Counts, rows_of_x: str
) -> tuple[Matrix, Matrix]:
    """The counts as [card, expert] matrices, on which all cards agree expert by expert."""
    with guard(comm, operator):
        check_tensor("x", x)
        core_name(x.dtype)
        for name, counts in (("local_count", local_count), ("global_count", global_count)):
            if isinstance(counts, Tensor) and counts.dtype != paddle.int64:
                raise InvalidTensorError(f"Please use int64 type in {name}, which has dtype {counts.dtype}.", 13)
        local, global_ = experts.read(comm.size, x.shape, local_count, global_count, rows_of_x)
    experts.agree(comm, operator, local, global_)
    return local, global_


def _transposed(rows: Tensor, counts: Matrix) -> Tensor:
    order = experts.transposition(counts)
    return rows if order is None or rows.size == 0 else Permute.apply(rows, order)
