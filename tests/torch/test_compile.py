"""torch.compile with fullgraph=True: same results and gradients, few recompilations, no collective dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_groups import on_group
from compiled import BACKENDS, OPTIONS, compiled, value_and_gradient
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import PeerMismatchError
from alltoallv.testing import Ranks


def _check(function: Callable[..., Tensor], backend: str, calls: list[tuple[Any, ...]]) -> None:
    """Values and gradients of the compiled function are the function's, bit for bit."""
    made = compiled(function, backend)
    for given in calls:
        assert all(map(torch.equal, value_and_gradient(made, *given), value_and_gradient(function, *given)))


def _counts(comm: Communicator, seed: int) -> tuple[list[int], list[int]]:
    """Random counts of this rank to and from all."""
    matrix = torch.randint(1, 5, (comm.size, comm.size), generator=torch.Generator().manual_seed(seed))
    return matrix[comm.rank].tolist(), matrix[:, comm.rank].tolist()


@BACKENDS
@pytest.mark.parametrize("kind", ["lists", "tensors", "learnt"])
@on_ranks(2, **OPTIONS)
def test_all_to_all_v(comm: Communicator, backend: str, kind: str) -> None:
    """Elements, rows, and regions with gaps and overlaps."""

    def function(x: Tensor, sends: Any, recvs: Any) -> Tensor:
        recvs = None if kind == "learnt" else recvs
        rows = at.all_to_all_v(x * 2, sends, recvs, unit="row", group=comm)
        elements = at.all_to_all_v(rows * rows, sends, recvs, sdispls=[0, 5], unit="element", group=comm)
        where = {} if kind == "learnt" else {"rdispls": [9, 2]}
        arriving = None if kind == "learnt" else [[2, 2], [1, 1]][comm.rank]
        regions = at.all_to_all_v(elements * 3, [2, 1], arriving, sdispls=[1, 0], group=comm, **where)
        return torch.cat([rows.view(-1), elements, regions])

    calls = []
    for seed in range(2):
        sends, recvs = _counts(comm, seed)
        calls.append((torch.randn(sum(sends), 8), sends, recvs))
    if kind == "tensors":
        calls = [(x, torch.tensor(sends), torch.tensor(recvs)) for x, sends, recvs in calls]
    _check(function, backend, calls)


@pytest.mark.parametrize("kind", ["lists", "tensors", "learnt"])
def test_one_graph_serves_many_counts(ranks: Ranks, kind: str) -> None:
    """20 count vectors, and with them 20 shapes, make at most 3 graphs: the first and 2 recompilations."""

    def check(comm: Communicator) -> int:
        graphs = 0

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            nonlocal graphs
            graphs += 1
            return graph.forward

        def function(x: Tensor, *counts: Any) -> Tensor:
            return at.all_to_all_v(x + 1, *counts, group=comm) * 2

        torch._dynamo.reset()
        made = torch.compile(function, fullgraph=True, backend=backend)
        for seed in range(20):
            sends, recvs = _counts(comm, seed)
            counts = (sends,) if kind == "learnt" else (sends, recvs)
            if kind == "tensors":
                counts = tuple(map(torch.tensor, counts))
            x = torch.randn(sum(sends))
            assert torch.equal(made(x, *counts), function(x, *counts))
        return graphs

    assert max(ranks(2, **OPTIONS)(check)) <= 3


@BACKENDS
@on_ranks(2, **OPTIONS)
def test_every_collective_runs_in_order(comm: Communicator, backend: str) -> None:
    """Also those whose results nobody uses, for which the peers would wait all the same."""

    def function(x: Tensor) -> Tensor:
        a = at.functional.all_reduce(x, comm)
        at.functional.all_gather(x, comm)
        c = at.functional.reduce_scatter(x, comm)
        at.all_to_all_v(x, [2, 2], group=comm)
        return torch.cat([c, a])

    made = compiled(function, backend)
    with torch.no_grad():
        assert made(torch.ones(4)).tolist() == [2] * 6
    own = next(rank for rank in comm.flight_record()["ranks"] if rank["rank"] == comm.rank)
    order = [operator["operator"] for operator in own["operators"]]
    assert order == ["all_reduce", "all_gather_into_tensor", "reduce_scatter", "all_to_all_v"]


@on_ranks(2, **OPTIONS)
def test_errors_surface(comm: Communicator) -> None:
    """Counts are checked when the operator runs, and the communicator goes on."""
    made = compiled(lambda x, s, r: at.all_to_all_v(x, s, r, group=comm))
    with pytest.raises(PeerMismatchError, match=r"rank 1 sends 2 elements to rank 1, which expects 3.*A2A-3010"):
        made(torch.ones(4), [2, 2], [2, 2 + comm.rank])
    assert made(torch.ones(4), [2, 2], [2, 2]).tolist() == [1, 1, 1, 1]


@BACKENDS
@on_ranks(2, **OPTIONS)
def test_collectives_that_write_into_tensors(comm: Communicator, backend: str) -> None:
    """Reductions, gathers and those with a root, in place and out of place, are in the graph and give the same."""
    largest = dist.ReduceOp(dist.ReduceOp.MAX)  # an object, not the enum's value

    def function(x: Tensor) -> list[Tensor]:
        total = x * 2
        at.all_reduce(total, largest, group=comm)
        part, single = torch.zeros_like(x[:2]), torch.zeros_like(x[:2])
        at.reduce_scatter(part, [x[:2], x[2:4] + 1], group=comm)
        at.reduce_scatter_tensor(single, total[:4], group=comm)
        whole = [torch.zeros_like(x), torch.zeros_like(x)]
        work = at.all_gather(whole, total + part.sum(), group=comm, async_op=True)
        assert work is not None
        work.wait()
        told, summed, share = whole[0] - comm.rank, x + 1, torch.zeros_like(x[:2])
        at.broadcast(told, 1, group=comm)
        at.reduce(summed, 1, dist.ReduceOp.MIN, group=comm)
        gathered = [torch.zeros_like(x), torch.zeros_like(x)] if comm.rank == 0 else None
        at.gather(told * 3, gathered, 0, group=comm)
        at.scatter(share, [x[:2], told[2:4]] if comm.rank == 1 else None, 1, group=comm)
        return [total, part, single, *whole, told, summed, share, *(gathered or [])]

    made = compiled(function, backend)
    for seed in range(3):
        x = torch.randn(5, generator=torch.Generator().manual_seed(seed + 10 * comm.rank))
        for one, other in zip(function(x), made(x), strict=True):
            assert torch.equal(one, other)


@on_ranks(2, **OPTIONS)
def test_rows_without_elements(comm: Communicator) -> None:
    """As many come as without a graph, also with gaps; only counts in lists state how many."""
    sends, recvs = [1, 2], [1 + comm.rank] * 2

    def function(x: Tensor) -> Tensor:
        packed = at.all_to_all_v(x, sends, recvs, group=comm)
        gaps = at.all_to_all_v(x, sends, recvs, rdispls=[1, 3 + comm.rank], group=comm)
        return torch.cat([packed, gaps])

    _check(function, "aot_eager", [(torch.ones(3, *tail),) for tail in ((0,), (2, 0), (0, 2))])
    assert compiled(function)(torch.ones(3, 0)).shape == function(torch.ones(3, 0)).shape == (6 + 4 * comm.rank, 0)
    # The compiler of torch 2.11 shows the class alone.
    arguments = r"\(\)" if torch.__version__[:5] == "2.11." else ".input has rows without elements, expected"
    with pytest.raises(Exception, match=rf"InvalidParamError\({arguments}"):
        compiled(lambda x: at.all_to_all_v(x, sends, group=comm))(torch.ones(3, 0))


@on_group(2, seconds=200)
def test_calls_between_graphs(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """The compiler leaves out of its graphs what the backend does between them, also when torch's C++ calls it."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, at.QuantizedCommHook(group_size=32))

    def step(x: Tensor) -> list[Tensor]:
        model(x).sum().backward()
        y, others, from_peer = x * (rank + 1), [torch.empty_like(x) for _ in range(size)], torch.empty_like(x)
        dist.all_gather(others, y)
        work = dist.all_reduce(y, async_op=True)
        messages = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, from_peer, 1 - rank)]
        for each in (work, *dist.batch_isend_irecv(messages)):
            assert each is not None
            each.wait()
        dist.monitored_barrier()
        return [y, *others, from_peer, *(p.grad for p in model.parameters() if p.grad is not None)]

    torch._dynamo.reset()
    x = torch.ones(2, 2)
    found = torch.compile(step, backend="eager")(x)
    model.zero_grad()
    assert all(map(torch.equal, found, step(x)))
