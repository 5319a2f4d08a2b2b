"""Paddle's global_scatter and global_gather on torch tensors; the counts are those of `alltoallv.numpy.moe`."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.counts import Counts, packed
from alltoallv.errors import InvalidParamError, PeerMismatchError
from alltoallv.guard import guard
from alltoallv.torch import calls
from alltoallv.torch import group as groups
from alltoallv.torch.calls import AnyCommunicator
from alltoallv.torch.functions import all_to_all_v
from alltoallv.torch.group import Group, device_of


def global_scatter(x: Tensor, local_count: Counts, global_count: Counts, group: Group = None) -> Tensor:
    """Sends every row to the card of its expert. Differentiable.

    Args:
        x: Shape ``[n, ...]``, rows sorted by card, then by expert: ``local_count[e + j * E]`` for expert e of card j.
        local_count, global_count: ``W * E`` integers >= 0, entry ``e + j * E`` standing for expert e and card j: rows
            that go from here to expert e of card j, and rows that come from card j for expert e of this card.

    Returns:
        Shape ``[sum(global_count), ...]``, rows sorted by this card's expert, then by the card they come from.

    Raises:
        As `alltoallv.torch.all_to_all_v`; PeerMismatchError also when two cards disagree about one expert's rows.
    """
    comm = groups.resolve(group, device_of(x))
    if comm is None:
        return None  # type: ignore[return-value]
    local, global_ = _checked("global_scatter", comm, x, local_count, global_count, "local_count")
    received = all_to_all_v(x, local.sum(1), global_.sum(1), unit="row", group=comm)
    return _transposed(received, global_)


def global_gather(x: Tensor, local_count: Counts, global_count: Counts, group: Group = None) -> Tensor:
    """The inverse of `global_scatter`: brings the rows back to the cards that sent them. Differentiable.

    Args:
        x: Rows sorted by this card's expert, then by card. Shape ``[sum(global_count), ...]``.
        local_count, global_count: Those of `global_scatter`.

    Returns:
        Shape ``[sum(local_count), ...]``, rows sorted by the card they come from, then by that card's expert.
    """
    comm = groups.resolve(group, device_of(x))
    if comm is None:
        return None  # type: ignore[return-value]
    local, global_ = _checked("global_gather", comm, x, local_count, global_count, "global_count")
    by_card = _transposed(x, global_.T)
    return all_to_all_v(by_card, global_.sum(1), local.sum(1), unit="row", group=comm)


def _checked(
    operator: str, comm: AnyCommunicator, x: Tensor, local_count: Counts, global_count: Counts, rows_of_x: str
) -> tuple[Tensor, Tensor]:
    """The counts as [card, expert] matrices, on which all cards agree expert by expert."""
    matrices = {}
    host = groups.on_host(comm)  # counts lie in host memory wherever the rows do
    with guard(host, operator):
        for name, counts in (("local_count", local_count), ("global_count", global_count)):
            tensor = torch.as_tensor(counts).cpu()
            bad_type = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool
            if tensor.dim() != 1 or bad_type or tensor.numel() % comm.size or not tensor.numel():
                raise InvalidParamError(
                    f"{name} has dtype {tensor.dtype} and shape {tuple(tensor.shape)}, expected integers, "
                    f"{comm.size} cards times the number of experts"
                )
            if (tensor < 0).any():
                raise InvalidParamError(f"{name} is {tensor.tolist()}, expected entries >= 0")
            matrices[name] = tensor.to(torch.int64).view(comm.size, -1).contiguous()
        local, global_ = matrices["local_count"], matrices["global_count"]
        if local.shape != global_.shape:
            raise InvalidParamError(
                f"local_count has {local.numel()} entries and global_count {global_.numel()}, expected one length"
            )
        total = int(matrices[rows_of_x].sum())
        if x.dim() == 0 or total != x.shape[0]:
            raise InvalidParamError(f"{rows_of_x} sums to {total}, expected the rows of x, of shape {tuple(x.shape)}")
        told = torch.empty_like(global_)
        experts = [local.shape[1]] * comm.size
        places = packed(experts)
        call = calls.exchange(host, "exchange_counts", told, local, (experts, places, experts, places))
    call.run()
    with guard(comm, operator):
        for card, expert in (told != global_).nonzero().tolist():
            raise PeerMismatchError(
                f"rank {card} sends {int(told[card, expert])} rows to expert {expert} of rank {comm.rank}, "
                f"which expects {int(global_[card, expert])}"
            )
    return local, global_


def _transposed(rows: Tensor, counts: Tensor) -> Tensor:
    """Rows sorted by (i, k), with ``counts[i, k]`` of each, sorted by (k, i) instead."""
    if 1 in counts.shape:
        return rows
    flat = counts.reshape(-1)
    begin = flat.cumsum(0) - flat
    block = torch.arange(flat.numel()).view(counts.shape).T.reshape(-1)
    lengths = flat[block]
    first = torch.repeat_interleave(begin[block] - (lengths.cumsum(0) - lengths), lengths)
    return rows[(first + torch.arange(rows.shape[0])).to(rows.device)]
