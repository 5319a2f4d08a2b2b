"""The dispatcher of a mixture of experts moves tokens of NPUs to the same places and bits as in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from npu_ranks import group
from on_ranks import on_ranks

import alltoallv.torch as at
from alltoallv.errors import AllToAllVError

EXPERTS, K, WIDTH = 8, 3, 6


def layer(device: Any, rank: int, options: dict[str, Any]) -> list[Any]:
    """Everything that dispatch and combine return, there and back, with gradients, later and by a known way."""
    generator = torch.Generator().manual_seed(rank)
    x, weights = torch.randn(5 + rank, WIDTH, generator=generator), torch.rand(5 + rank, K, generator=generator)
    ids = torch.rand(5 + rank, EXPERTS, generator=generator).argsort(1)[:, :K].to(device)
    tokens, gates = (t.to(device, copy=True).requires_grad_() for t in (x, weights))
    dispatcher = at.nn.MoEDispatcher(EXPERTS, **options)
    rows, counts, state = dispatcher.dispatch(tokens, ids, gates)
    about = [torch.tensor(counts), state.experts, state.sources, state.chosen, state.kept]
    if options.get("codes"):
        return [rows, state.scales, *about]
    y = dispatcher.combine(rows * 2, state)
    y.sum().backward()
    again, _, other = dispatcher.dispatch(tokens.detach() * 3, state, gates.detach())
    late, _, begun = dispatcher.dispatch(tokens.detach(), ids, gates.detach(), async_op=True).result()
    back = dispatcher.combine(late, begun, async_op=True).result()
    return [rows, y, tokens.grad, gates.grad, again, other.weights, back, *about]


OPTIONS: list[dict[str, Any]] = [
    {"alignment": 4, "active_ranks": [False, True]},
    {"capacity": 1, "drop": "lightest"},
    {"payload": "int8", "combine_payload": "int8"},
    {"payload": "int8", "codes": True},
]


@on_ranks(2, communicator=False)
def test_the_same_bits_as_in_host_memory(rank: int, n: int, file: str) -> None:
    with group(rank, n, file) as (_, device):
        for options in OPTIONS:
            for here, there in zip(layer("cpu", rank, options), layer(device, rank, options), strict=True):
                assert torch.equal(here, there.cpu()), options


@on_ranks(2, communicator=False)
def test_what_ranks_disagree_about(rank: int, n: int, file: str) -> None:
    with group(rank, n, file) as (_, device):
        tokens, ids = torch.ones(4, 2, device=device), torch.zeros(4, 1, dtype=torch.int64, device=device)
        with pytest.raises(AllToAllVError, match="differ in their weights, choices, experts or options"):
            at.nn.MoEDispatcher(2, alignment=1 + rank).dispatch(tokens, ids)
        with pytest.raises(AllToAllVError, match="expert_ids holds 2, expected 0 to 1"):
            at.nn.MoEDispatcher(2).dispatch(tokens, ids + 2 * rank)
