"""Asynchronous calls: handles, several in flight, lifetimes, errors."""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import CommTimeoutError, InvalidParamError
from alltoallv.numpy import recv, send

LATE = 0.3  # seconds that a peer lets others wait


@on_ranks(2)
def test_returns_before_its_peers_come(comm: Communicator) -> None:
    if comm.rank:
        recv(np.empty(1), 0, group=comm)  # once the other one's call has returned
    y, work = at.all_to_all_v(torch.ones(2), [1, 1], [1, 1], group=comm, async_op=True)
    if comm.rank == 0:
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        with pytest.raises(CommTimeoutError, match="still under way"):
            work.wait(0.01)
        with pytest.raises(CommTimeoutError, match="still under way"):
            work.wait(timedelta(milliseconds=10))
        send(np.zeros(1), 1, group=comm)
    assert work.wait(timedelta())  # as in torch, zero is no limit
    assert y.tolist() == [1, 1]
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result() is y
    work.synchronize()
    unknown, work = at.all_to_all_v(y, [1, 1], group=comm, async_op=True)
    assert unknown is None
    assert work.result().tolist() == [1, 1]


@on_ranks(2)
def test_futures(comm: Communicator) -> None:
    if comm.rank:
        time.sleep(LATE)
    _, work = at.all_to_all_v(torch.ones(2), [1, 1], [1, 1], group=comm, async_op=True)
    future = work.get_future().then(lambda future: future.value() * 2)
    assert future.wait().tolist() == [2, 2]
    _, work = at.all_to_all_v(torch.ones(2), [1, 1], [1, 1 + comm.rank], group=comm, async_op=True)
    with pytest.raises(RuntimeError, match="PeerMismatchError"):
        work.get_future().wait()


@on_ranks(2)
def test_tensors_stay_alive(comm: Communicator) -> None:
    """Nobody holds the input, the output or the handle while the peer lets them wait."""
    n = 1 << 18  # too much to travel with the announcement
    x = torch.full((2 * n,), comm.rank + 1.0)
    output = torch.empty(2 * n)
    at.all_to_all_single(output, x, group=comm, async_op=True)
    del x
    gc.collect()
    filler = [torch.full((2 * n,), -1.0) for _ in range(8)]  # takes freed memory
    if comm.rank:
        time.sleep(LATE)
    at.functional.all_reduce(torch.ones(1), comm)
    assert torch.equal(output, torch.tensor([1.0, 2.0]).repeat_interleave(n))
    assert len(filler) == 8


@on_ranks(2)
def test_they_are_released_when_done(comm: Communicator) -> None:
    """After the wait, the handle holds the output only; a handle that was dropped unfinished holds nothing."""

    def used() -> int:
        gc.collect()
        return comm.stats()["arena_used_bytes"]

    before, n = used(), 1 << 18
    y, work = at.all_to_all_v(at.empty(2 * n), [n, n], [n, n], group=comm, async_op=True)
    work.wait()
    assert used() - before < 1.5 * y.nbytes
    assert work.result() is y
    del y, work
    assert used() == before
    at.all_to_all_v(at.empty(2 * n), [n, n], [n, n], group=comm, async_op=True)
    at.all_to_all_v(torch.ones(2), [1, 1], [1, 1], group=comm, async_op=True)[1].wait()
    at.all_to_all_v(torch.ones(2), [1, 1], [1, 1], group=comm, async_op=True)[1].wait()
    assert used() - before < n  # the next asynchronous call lets go of what is done


@on_ranks(2)
def test_own_mistakes_raise_at_once(comm: Communicator) -> None:
    x = torch.ones(2, requires_grad=comm.rank == 0)
    if comm.rank == 0:
        with pytest.raises(InvalidParamError, match=r"expected one or the other.*A2A-1151"):
            at.all_to_all_v(x, [1, 1], [1, 1], out=torch.empty(2), group=comm, async_op=True)
    else:
        _, work = at.all_to_all_v(x, [1, 1], [1, 1], group=comm, async_op=True)
        with pytest.raises(InvalidParamError, match=r"rank 0.*A2A-1151"):
            work.wait()
    with pytest.raises(InvalidParamError, match=r"expected recv_counts.*A2A-1122"):
        at.all_to_all_v(torch.ones(2, requires_grad=True), [1, 1], group=comm, async_op=True)


@on_ranks(2)
def test_gradients_through_asynchronous_calls(comm: Communicator) -> None:
    """Several in flight; the gradients travel in the same order on all ranks."""
    leaves = [torch.full((2,), n + 1.0, requires_grad=True) for n in range(3)]
    started: list[tuple[Tensor, Any]] = [
        at.all_to_all_v(x * x, [1, 1], [1, 1], group=comm, async_op=True) for x in leaves
    ]
    total = torch.zeros(())
    for y, work in started:
        work.wait()
        total = total + (y * (comm.rank + 1)).sum()
    total.backward()
    for x in leaves:
        assert torch.equal(x.grad, 2 * x.detach() * torch.tensor([1.0, 2.0]))
