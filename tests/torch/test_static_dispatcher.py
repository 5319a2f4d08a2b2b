"""The dispatcher of static shapes: its definition in loops, `MoEDispatcher`'s bits, gradients, graphs, mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled import OPTIONS as COMPILING
from compiled import compiled, value_and_gradient
from on_ranks import on_ranks
from replicated import check_gradients
from torch import Tensor

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError

K, WIDTH, TOKENS = 2, 3, 12


def problem(rank: int, experts: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Fewer tokens on higher ranks, and choices of no expert."""
    generator, n = torch.Generator().manual_seed(rank), TOKENS // (rank + 1)
    ids = torch.rand(n, experts, generator=generator).argsort(1)[:, :K]
    ids[1::4, 1] = -1
    tokens, weights = (torch.randn(n, width, generator=generator) for width in (WIDTH, K))
    return tokens.to(dtype), ids, weights


def by_hand(size: int, experts: int, capacity: int, local: range) -> tuple[Tensor, Tensor]:
    """The rows and counts of the experts ``local``, from the definition."""
    rows, counts = torch.zeros(len(local), size * capacity, WIDTH), torch.zeros(len(local), size, dtype=torch.int64)
    for rank in range(size):
        tokens, ids, _ = problem(rank, experts)
        for token, choices in zip(tokens, ids.tolist(), strict=True):
            for expert in choices:
                if expert in local and (place := int(counts[local.index(expert), rank])) < capacity:
                    rows[local.index(expert), rank * capacity + place] = token
                    counts[local.index(expert), rank] += 1
    return rows, counts


@pytest.mark.parametrize(("experts", "capacity"), [(6, 2), (7, 1), (2, 4)])
@on_ranks(3)
def test_rows_and_counts_are_as_defined(comm: Communicator, experts: int, capacity: int) -> None:
    dispatcher = at.nn.StaticMoEDispatcher(experts, capacity, comm)
    tokens, ids, _ = problem(comm.rank, experts)
    rows, counts, state = dispatcher.dispatch(tokens, ids)
    wanted, counted = by_hand(comm.size, experts, capacity, dispatcher.local_experts)
    assert torch.equal(rows, wanted)
    assert torch.equal(counts, counted)
    kept = state.kept[:, :, None]
    back = dispatcher.combine(rows, state)
    assert torch.equal(back, torch.where(kept, tokens[:, None], 0).sum(1))
    assert not bool((state.kept & (ids < 0)).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_the_bits_of_the_other_dispatcher(comm: Communicator, dtype: torch.dtype) -> None:
    tokens, ids, weights = problem(comm.rank, 5, dtype)
    ids[ids < 0] = 4  # the other one has no choice of none
    results = []
    for dispatcher in (at.nn.StaticMoEDispatcher(5, TOKENS, comm), at.nn.MoEDispatcher(5, comm)):
        x, gates = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
        rows, _, state = dispatcher.dispatch(x, ids, gates)
        y = dispatcher.combine(rows * rows, state)
        (y * tokens).sum().backward()
        results.append((y.detach(), x.grad, gates.grad))
    assert torch.equal(results[0][0], results[1][0])
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(one, other)


@on_ranks(2)
def test_gradients(comm: Communicator) -> None:
    """First and second derivatives, by tokens and by gate weights, with choices that are left out."""
    ids = torch.randint(0, 3, (3, K), generator=torch.Generator().manual_seed(comm.rank))

    def function(x: Tensor) -> Tensor:
        dispatcher = at.nn.StaticMoEDispatcher(3, 1, comm)
        rows, _, state = dispatcher.dispatch(x[:, K:], ids, x[:, :K])
        return dispatcher.combine(rows * rows * (comm.rank + 1), state)

    check_gradients(comm, [3, 3], (K + 2,), function)


@on_ranks(2, **COMPILING)
def test_in_one_graph(comm: Communicator) -> None:
    """Which shows that nothing on the host depends on the values of tensors."""
    _, ids, weights = problem(0, 5)
    dispatcher = at.nn.StaticMoEDispatcher(5, 3, comm)

    def step(tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows, counts, state = dispatcher.dispatch(tokens, ids, weights)
        return dispatcher.combine(rows * counts.sum(), state)

    graph = compiled(step)
    for seed in (1, 2):
        x = problem(0, 5)[0] * seed
        for plain, traced in zip(*(value_and_gradient(f, x, ids, weights) for f in (step, graph)), strict=True):
            assert torch.equal(plain, traced)


@on_ranks(2)
def test_mistakes_reach_all_ranks(comm: Communicator) -> None:
    tokens, ids, weights = problem(0, 8)
    odd = comm.rank == 1
    right = at.nn.StaticMoEDispatcher(8, 2, comm)

    def refused(kind: type[Exception], match: str, call: Any) -> None:
        with pytest.raises(kind, match=match):
            call()
        rows, _, state = right.dispatch(tokens, ids, weights)  # the next call works
        right.combine(rows, state)

    for experts, capacity in ((7, 2), (8, 3)):
        other = at.nn.StaticMoEDispatcher(experts, capacity, comm) if odd else right
        refused(PeerMismatchError, "rank", lambda other=other: other.dispatch(tokens, ids.clamp(max=6)))
    wrong = ids.clone()
    wrong[0, 0] = 8 if odd else 0
    refused(InvalidParamError, "expert_ids holds numbers from -1 to 8, expected -1 to 7.*A2A-1241",
            lambda: right.dispatch(tokens, wrong))  # fmt: skip
    rows, _, state = right.dispatch(tokens, ids, weights)
    refused(InvalidTensorError, r"expert_outputs has shape \(4, 3, 3\), expected \[4, 4, ...\].*A2A-2133",
            lambda: right.combine(rows[:, :3] if odd else rows, state))  # fmt: skip
    for dispatcher in (right, at.nn.MoEDispatcher(8, comm)):
        rows, _, state = dispatcher.dispatch(tokens, ids.clamp(min=0), weights)
        refused(InvalidParamError, r"state is of type NoneType, expected .* dispatch .*A2A-1490",
                lambda d=dispatcher, rows=rows, state=None if odd else state: d.combine(rows, state))  # fmt: skip
    for arguments in ((0, 1), (8, 0), (8, True), (8.0, 1)):
        with pytest.raises(InvalidParamError, match=r"expected an integer from 1 to .*A2A-1158"):
            at.nn.StaticMoEDispatcher(*arguments, comm)
