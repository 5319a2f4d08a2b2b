"""One dimension of a tensor for another: values, gradients, graphs, process groups, and attention over parts of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from swaps import check_swaps, random_case

import alltoallv.torch as at
from alltoallv import Communicator

DTYPES = ("float32", "int8", "float16", "complex64", "bool")


def gradient(loss: Any, x: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0].numpy()


@on_ranks(3)
def test_by_the_definition(comm: Communicator) -> None:
    check_swaps(at, torch.from_numpy, gradient, comm, comm, dtypes=DTYPES)


@pytest.mark.parametrize("backend", ["gloo", "alltoallv"])
@on_ranks(2, communicator=False)
def test_in_process_groups(rank: int, size: int, file: str, backend: str) -> None:
    dist.init_process_group(backend, store=dist.FileStore(file, size), rank=rank, world_size=size)
    x = torch.arange(24.0).reshape(2, 3, 4) + 100 * rank
    both = [torch.arange(24.0).reshape(2, 3, 4) + 100 * j for j in range(size)]
    wanted = torch.cat([each.chunk(size, 2)[rank] for each in both], 1)
    assert torch.equal(at.all_to_all_nd(x, 2, 1), wanted)
    group = dist.new_group([0])
    alone = at.all_to_all_nd(x, 2, 1, group)
    assert alone is None if rank else torch.equal(alone, x)
    dist.destroy_process_group()


@on_ranks(2)
def test_tensors_with_gaps(comm: Communicator) -> None:
    """Of several in one they are read where they lie; others are copied first."""
    rng = np.random.default_rng(3)
    for number in range(20):
        case = random_case(rng, 2)
        x = torch.from_numpy(case.inputs[comm.rank])
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 2)
        wide[..., 1:-1] = x
        order = rng.permutation(x.dim()).tolist()
        turned = x.permute(order).contiguous().permute(np.argsort(order).tolist())
        wanted = torch.from_numpy(case.wanted()[comm.rank])
        for given in (wide[..., 1:-1], turned, torch._neg_view(-x)):
            found = at.all_to_all_nd(given, case.scatter, case.gather, comm, **case.sizes())
            assert torch.equal(found, wanted), f"case {number}: {given.shape} {given.stride()} {case[1:]}"
    same = torch.ones(1, 2, 4).expand(3, 2, 4)
    assert torch.equal(at.all_to_all_nd(same, 2, 1, comm), torch.ones(3, 4, 2))


@on_ranks(2)
def test_gradients_of_any_order(comm: Communicator) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def swapped(x: torch.Tensor) -> torch.Tensor:
        return at.all_to_all_nd(x, 2, 1, comm, scatter_sizes=[3, 1])

    y = swapped(x)
    slopes = torch.randn_like(y)
    first = torch.autograd.grad((y**2 * slopes).sum() / 2, x, create_graph=True)[0]
    back = at.heads_to_sequence((y * slopes).detach(), comm, heads=[3, 1])
    assert torch.equal(first, back)
    second = torch.autograd.grad(first.sum(), x)[0]
    assert torch.equal(second, at.heads_to_sequence(slopes, comm, heads=[3, 1]))
    later, work = at.all_to_all_nd(x, 2, 1, comm, scatter_sizes=[3, 1], async_op=True)
    work.wait()
    assert torch.equal(torch.autograd.grad((later * slopes).sum(), x)[0], second)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_ranks(2)
def test_in_a_graph(comm: Communicator, backend: str) -> None:
    """An operator of its own, also for the gradient; a length may change."""

    def attention(q: torch.Tensor) -> torch.Tensor:
        heads = at.sequence_to_heads(q, comm)
        return at.heads_to_sequence(torch.softmax(heads, -1) @ heads.mT @ heads, comm)

    compiled = torch.compile(attention, fullgraph=True, backend=backend)
    for length in (4, 6, 8):
        q = torch.randn(2, length, 2, 3, requires_grad=True)
        eager, graph = attention(q), compiled(q)
        torch.testing.assert_close(graph, eager)
        of_eager, of_graph = (torch.autograd.grad(y.square().sum(), q)[0] for y in (eager, graph))
        torch.testing.assert_close(of_graph, of_eager)
