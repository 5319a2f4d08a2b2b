"""While a dispatch mode is active, each call of `alltoallv.torch` is an operator that the mode sees."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every_function import functions_of, input_of
from on_ranks import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import alltoallv.torch as at
from alltoallv import AllToAllVParam, Communicator
from alltoallv.errors import CommTimeoutError, PeerMismatchError

UNSEEN = {"memory": 0, "learnt handle": 0}  # what communicates nothing; a call whose result is not known when it begins
TWICE = {"single": 2, "quantized out": 1, "functional": 2, "scattered": 1, "there and back": 2, "told": 1}


class Seen(TorchDispatchMode):
    """Lists the names of alltoallv's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "alltoallv":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tracks", [False, True])
@on_ranks(2)
def test_every_function(comm: Communicator, tracks: bool) -> None:
    for name, function in functions_of(comm).items():
        if tracks and name in ("out", "gaps", "quantized out", "learnt handle", "handle"):
            continue  # these refuse gradients, or have none in the mode's sight
        x = input_of(comm).requires_grad_(tracks)
        expected = function(x)
        with Seen() as seen:
            y = function(x)
        assert torch.equal(y, expected), name
        assert len(seen.names) == (UNSEEN | TWICE).get(name, 1), (name, seen.names)


@on_ranks(2)
def test_collectives_of_torch(comm: Communicator) -> None:
    """In place, later and in time; ranks that are watched meet those that are not."""
    watches = comm.rank == 0
    for async_op in (False, True):
        x, parts, whole = torch.full((3,), comm.rank + 1.0), list(torch.zeros(2, 3)), torch.zeros(3, 2).t()
        with Seen() if watches else torch.no_grad() as seen:
            works = [
                at.all_reduce(x, group=comm, async_op=async_op),
                at.all_gather(parts, x.clone().fill_(comm.rank), group=comm, async_op=async_op),
                at.broadcast(whole, 1, group=comm, async_op=async_op),
                at.reduce(torch.ones(2), 0, dist.ReduceOp.MAX, group=comm, async_op=async_op),
            ]
            for work in works if async_op else ():
                assert work is not None
                assert work.wait()
        assert x.tolist() == [3] * 3
        assert [part.tolist() for part in parts] == [[0] * 3, [1] * 3]
        if seen is not None:
            assert seen.names == ["collective_"] * 4
    with Seen(), pytest.raises(PeerMismatchError, match="rank 1 has elements: 3"):
        at.all_reduce(torch.ones(2 + comm.rank), group=comm)
    plan = at.Plan([1, 1], [1, 1], group=comm)
    with Seen() as both:
        assert plan(torch.arange(2.0) + comm.rank).tolist() == [comm.rank, comm.rank + 1]
    assert both.names == ["collective_"]


@on_ranks(2)
def test_a_timeout_of_a_call(comm: Communicator) -> None:
    if comm.rank == 0:
        with Seen(), pytest.raises(CommTimeoutError):
            at.all_to_all_v(torch.ones(2), [1, 1], [1, 1], group=comm, timeout=0.2)
    else:
        while comm.usable:
            time.sleep(0.01)
        with pytest.raises(CommTimeoutError):
            at.all_to_all_v(torch.ones(2), [1, 1], [1, 1], group=comm)


@on_ranks(2)
def test_operations(comm: Communicator) -> None:
    about = {"rank": comm.rank, "rank_size": 2, "send_counts": [1, 1], "sdispls": [0, 1]}
    operation = at.AllToAllVOperation(AllToAllVParam(**about, recv_counts=[1, 1], rdispls=[0, 1]), comm)
    for _ in range(2):
        with Seen() as seen:
            y = operation(torch.arange(2.0) + comm.rank)
        assert y.tolist() == [[comm.rank, comm.rank + 1]]
        assert seen.names == ["launch_"]
