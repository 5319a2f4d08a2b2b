"""The dispatcher's options: the bits of NumPy's, gradients on any number of ranks, and graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compiled import BACKENDS, compiled
from compiled import OPTIONS as COMPILING
from on_ranks import on_ranks
from replicated import check_gradients
from torch import Tensor

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import InvalidTensorError, PeerLostError, PeerMismatchError
from alltoallv.testing import Ranks

EXPERTS, K, WIDTH, TOKENS = 6, 2, 7, 20
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "capacity": ({}, {"capacity": 1.0, "alignment": 4}),
    "lightest": ({"chunks": 2}, {"capacity": 2, "drop": "lightest"}),
    "int8": ({"shared": lambda x: x * x}, {"payload": "int8", "combine_payload": "int8"}),
    "int4": ({"chunks": 3}, {"payload": "int4"}),
    "float8": ({}, {"payload": "fp8_e4m3", "combine_payload": "mxfp8"}),
    "float4": ({}, {"payload": "nvfp4", "combine_payload": "mxfp4"}),
    "elsewhere": ({}, {"placement": ((5, 1), (0, 2))}),  # 3 and 4 are lost
    "inactive": ({}, {"active_ranks": [True, False]}),
}


def problem(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(TOKENS, WIDTH, generator=generator)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :K]
    return tokens, ids, torch.rand(TOKENS, K, generator=generator)


@on_ranks(2)
def test_the_bits_of_numpy(comm: Communicator) -> None:
    given = problem(comm.rank)
    for call, options in OPTIONS.values():
        torch_one = at.nn.MoEDispatcher(EXPERTS, comm, **options)
        other = av.MoEDispatcher(EXPERTS, comm, **options)
        experts = [lambda rows, e=e: rows * (e + 0.5) for e in torch_one.local_experts]
        y = torch_one(*given, experts, **call)
        assert np.array_equal(y.numpy(), other(*(x.numpy() for x in given), experts, **call))
        rows, counts, state = torch_one.dispatch(*given)
        _, counted, known = other.dispatch(*(x.numpy() for x in given))
        assert (counts, state.received) == (counted, known.received)
        for name in ("experts", "sources", "chosen", "kept", "weights"):
            assert np.array_equal(getattr(state, name).numpy(), getattr(known, name)), name
        assert np.array_equal(torch_one.load(state).kept, other.load(known).kept)
        again, _, _ = torch_one.dispatch(given[0], state)
        assert "payload" in options or torch.equal(again, rows)


@pytest.mark.parametrize("name", ["lightest", "elsewhere"])
def test_gradients(ranks: Ranks, name: str) -> None:
    """First and second derivatives, by tokens and by gate weights."""
    call, options = OPTIONS[name]

    def check(comm: Communicator) -> None:
        ids = torch.randint(0, EXPERTS, (2, K), generator=torch.Generator().manual_seed(comm.rank))
        drop = {**options, "drop": "last"}  # which are the lightest must not change with them

        def function(x: Tensor) -> Tensor:
            dispatcher = at.nn.MoEDispatcher(EXPERTS, comm, **drop)
            experts = [lambda rows, e=e: rows * rows * (e + 1) for e in dispatcher.local_experts]
            return dispatcher(x[:, K:], ids, x[:, :K], experts, **call)

        check_gradients(comm, [2, 2], (K + 2,), function)

    ranks(2)(check)


@on_ranks(2)
def test_float8_codes_and_scales(comm: Communicator) -> None:
    """At once and in a graph."""
    tokens, ids, _ = problem(comm.rank)
    coded = at.nn.MoEDispatcher(EXPERTS, comm, payload="fp8_e5m2", codes=True)
    rows, _, _ = at.nn.MoEDispatcher(EXPERTS, comm, payload="fp8_e5m2").dispatch(tokens, ids)
    for call in (coded.dispatch, compiled(coded.dispatch, "eager")):
        codes, _, state = call(tokens, ids)
        assert codes.dtype == torch.float8_e5m2
        assert torch.equal(codes.float() * state.scales[:, None], rows)


@on_ranks(2)
def test_gradients_pass_straight_through_codes(comm: Communicator) -> None:
    tokens, ids, weights = problem(comm.rank)
    grads = []
    for payload in (None, "int8"):
        x = tokens.clone().requires_grad_()
        dispatcher = at.nn.MoEDispatcher(EXPERTS, comm, payload=payload, combine_payload=payload)
        rows, _, state = dispatcher.dispatch(x, ids, weights)
        (dispatcher.combine(rows * 2, state) * tokens).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@on_ranks(2, **COMPILING)
def test_ranks_whose_graphs_disagree(comm: Communicator) -> None:
    """The operators of a graph check what is known only when it runs."""
    dispatcher, (x, ids, weights) = at.nn.MoEDispatcher(EXPERTS, comm), problem(0)
    rows, _, state = dispatcher.dispatch(x, ids)
    made = compiled(lambda x, weights: dispatcher.dispatch(x, state, weights)[0], "eager")
    with pytest.raises(PeerMismatchError, match=r"rank 0 moves .* float32, rank 1 moves .* float64.*A2A-3009"):
        made(x.double() if comm.rank else x, weights)
    with pytest.raises(InvalidTensorError, match=rf"tokens has shape .*, expected {len(x)} rows.*A2A-2017"):
        made(x if comm.rank else x[:-1], weights)
    with pytest.raises(InvalidTensorError, match=r"expert_outputs has shape .*, expected .* rows.*A2A-2019"):
        compiled(lambda rows: dispatcher.combine(rows, state), "eager")(rows[1 - comm.rank :])


@BACKENDS
@on_ranks(2, **COMPILING)
def test_one_graph(comm: Communicator, backend: str) -> None:
    """The whole layer, forward and backward, serves other routes and active ranks without another graph."""
    active = torch.ones(2, dtype=torch.bool)
    for options in ({}, {"alignment": 4, "capacity": 1.0, "payload": "int8", "active_ranks": active}):
        dispatcher = at.nn.MoEDispatcher(EXPERTS, comm, **options)

        def layer(x: Tensor, ids: Tensor, weights: Tensor, dispatcher: Any = dispatcher) -> Tensor:
            return dispatcher(x * 2, ids, weights, lambda rows, counts: rows * rows, shared=torch.neg) + 1

        made = compiled(layer, backend)
        for seed in (comm.rank, comm.rank + 7):
            tokens, ids, weights = problem(seed)
            active[1] = seed < 2
            results = []
            for function in (layer, made):
                x, w = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
                y = function(x, ids, w)
                y.square().sum().backward()
                results.append((y.detach(), x.grad, w.grad))
            bound = 1e-5 if backend == "inductor" else 0.0  # which fuses multiplications and additions
            for ours, expected in zip(*results, strict=True):
                torch.testing.assert_close(ours, expected, rtol=bound, atol=0.0)


@on_ranks(3, **COMPILING)
def test_a_graph_after_a_loss(comm: Communicator) -> None:
    """With the survivors' dispatcher it is recorded anew, and reads which of them get tokens as it runs."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.active = torch.ones(3, dtype=torch.bool)
            self.dispatcher = at.nn.MoEDispatcher(EXPERTS, comm, active_ranks=self.active)

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return self.dispatcher(x, ids, weights, lambda rows, counts: 2 * rows)

    layer, (x, ids, weights) = Layer(), problem(comm.rank)
    made = compiled(layer, "eager")
    torch.testing.assert_close(made(x, ids, weights), layer(x, ids, weights), rtol=0, atol=0)
    if comm.rank == 1:
        comm.destroy()
        return
    with pytest.raises(PeerLostError):
        made(x, ids, weights)
    layer.dispatcher = layer.dispatcher.survivors()
    assert layer.active.tolist() == [True, False, True]
    for last in (True, False, True):
        layer.active[2] = last
        expected = 2 * x * (weights * layer.active[ids // 2]).sum(1, keepdim=True)
        y = made(x, ids, weights)
        torch.testing.assert_close(y, layer(x, ids, weights), rtol=0, atol=0)
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("weighted", [False, True])
@on_ranks(2, **COMPILING)
def test_a_graph_checks_the_outputs_rows(comm: Communicator, weighted: bool) -> None:
    """One rank's experts return too few rows: an error on all, in place of memory beyond them."""
    dispatcher = at.nn.MoEDispatcher(2, comm)

    def layer(x: Tensor, ids: Tensor, length: int) -> Tensor:
        rows, _, state = dispatcher.dispatch(x, ids, torch.ones(ids.shape) if weighted else None)
        return dispatcher.combine(rows[:length].clone(), state)

    made, given = compiled(layer), (torch.ones(4, 3), torch.tensor([[0], [1], [0], [1]]))
    for length in (1, 2):
        with pytest.raises(
            InvalidTensorError, match=rf"expert_outputs has shape \({length}, 3\), expected 4 rows.*A2A-2019"
        ):
            made(*given, 4 if comm.rank else length)
    assert torch.equal(made(*given, 4), given[0])
