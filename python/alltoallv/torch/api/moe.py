"""Paddle's global_scatter and global_gather on torch tensors; the counts are as in `alltoallv._calls.experts`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from alltoallv._calls import experts
from alltoallv._calls.counts import Counts
from alltoallv._calls.experts import Matrix
from alltoallv._calls.guard import guard
from alltoallv.torch.api.functions import all_to_all_v
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.graphs import is_tracing
from alltoallv.torch.eager.group import Group, device_of
from alltoallv.torch.graph.library import Operator, known_size
from alltoallv.torch.graph.ops import communicator_of

__all__ = ["global_gather", "global_scatter"]


def global_scatter(x: Tensor, local_count: Counts, global_count: Counts, group: Group = None) -> Tensor:
    """Sends every row to the rank of its expert. Differentiable where `all_to_all_v` is.

    Args:
        x: Rows sorted by rank, then by expert: ``local_count[e + j * E]`` rows for expert e of rank j.
            Shape ``[n, ...]``.
        local_count, global_count: ``W * E`` integers >= 0, flat or of shape ``[W, E]``; entry ``e + j * E`` stands for
            expert e and rank j: rows that go from here to expert e of rank j, and rows that come from rank j for
            expert e of this rank.
        group: See `all_to_all_v`.

    Returns:
        Shape ``[sum(global_count), ...]``, rows sorted by this rank's expert, then by the rank they come from.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, also about the rows of one expert, or one
            is lost or late.
    """
    return _moved(x, local_count, global_count, group, gathers=False)


def global_gather(x: Tensor, local_count: Counts, global_count: Counts, group: Group = None) -> Tensor:
    """Brings the rows of `global_scatter` back to the ranks that sent them: its inverse, as differentiable.

    Args:
        x: Rows sorted by this rank's expert, then by rank. Shape ``[sum(global_count), ...]``.
        local_count, global_count, group: See `global_scatter`.

    Returns:
        Shape ``[sum(local_count), ...]``, rows sorted by the rank they come from, then by that rank's expert.

    Raises:
        AllToAllVError: as `global_scatter`.
    """
    return _moved(x, local_count, global_count, group, gathers=True)


def _moved(x: Tensor, local_count: Counts, global_count: Counts, group: Group, *, gathers: bool) -> Tensor:
    """Sends the rows; the ranks agree on the counts, [card, expert] matrices, expert by expert."""
    if is_tracing(x):
        counts_of_rows = local_count if gathers else global_count  # of the result's rows
        matrices = [torch.as_tensor(counts, device="cpu") for counts in (local_count, global_count)]
        rows = -1 if isinstance(counts_of_rows, Tensor) else sum(counts_of_rows)
        return global_rows(x, *matrices, rows, gathers, groups.name_of(group))
    comm = groups.resolve(group, device_of(x))
    if comm is None:
        return None  # type: ignore[return-value]
    operator, rows_of_x = ("global_gather", "global_count") if gathers else ("global_scatter", "local_count")
    host = groups.on_host(comm)  # counts lie in host memory wherever the rows do
    with guard(host, operator):
        local, global_ = experts.read(comm.size, x.shape, local_count, global_count, rows_of_x)
        received = torch.empty(global_.shape, dtype=torch.int64, device="cpu")
        call = calls.exchange(host, "exchange_counts", received, torch.from_numpy(local), experts.layout(local))
    call.run()
    experts.check_received(comm, operator, received.numpy(), global_)
    if gathers:
        return all_to_all_v(_transposed(x, global_.T), global_.sum(1), local.sum(1), unit="row", group=comm)
    return _transposed(all_to_all_v(x, local.sum(1), global_.sum(1), unit="row", group=comm), global_)


def _back(call: Any, grad: Tensor, *counts: Tensor) -> Any:
    return global_rows(grad, *counts, call.x.shape[0], not call.gathers, call.group)


@partial(
    Operator,
    fake=lambda x, local, received, rows, *others: x.new_empty((known_size(rows), *x.shape[1:])),
    gradient=_back,
    saves=("local_count", "global_count"),
)
def global_rows(x: Tensor, local_count: Tensor, global_count: Tensor, rows: int, gathers: bool, group: str) -> Tensor:
    """Does `global_scatter`, or `global_gather`, in a graph. The result has ``rows`` rows; -1: known when it runs."""
    return _moved(x, local_count, global_count, communicator_of(group, x), gathers=gathers)


def _transposed(rows: Tensor, counts: Matrix) -> Tensor:
    order = experts.transposition(counts)
    return rows if order is None else rows[torch.from_numpy(order).to(rows.device)]
