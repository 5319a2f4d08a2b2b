"""NCCL's way in host memory: views per peer, agreement before the first calls.

In place of NCCL, backend alltoallv of torch.distributed moves the views.
"""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from backend_groups import Grouped, on_group
from engine_groups import random_cases, run_case, staged, views
from on_ranks import on_ranks
from replicated import check_gradients

import alltoallv.torch as at
from alltoallv.errors import (
    BackendUnavailableError,
    CommTimeoutError,
    InvalidTensorError,
    PeerLostError,
    PeerMismatchError,
)
from alltoallv.testing import golden
from alltoallv.torch.engines.nccl import FIRST


@pytest.mark.parametrize(
    ("size", "way", "options"), [(1, views, {}), (2, views, {}), (3, staged, {}), (3, views, {"check": "always"})]
)
def test_random_exchanges(grouped: Grouped, size: int, way: Any, options: dict[str, Any]) -> None:
    """Given and learnt counts, at once and asynchronous, before and after the checked calls."""

    def run(rank: int, size: int, comm: Any, cases: list[golden.Case]) -> None:
        for number, case in enumerate(cases):
            run_case(comm, case, number)

    grouped(size, way, **options)(run, random_cases(size, 24))


@on_group(2, views)
def test_gradients(rank: int, size: int, comm: Any) -> None:
    """First and second derivatives with gaps, permutations and overlapping send regions; learnt counts."""
    sends = [[1, 2], [0, 1]][rank]
    recvs = [[1, 0], [2, 1]][rank]
    check_gradients(
        comm,
        [4, 2],
        (),
        lambda x: at.all_to_all_v(x, sends, recvs, sdispls=[0, 0], rdispls=[[1, 0], [0, 3]][rank], group=comm),
    )
    check_gradients(comm, [3, 1], (2,), lambda x: at.all_to_all_v(x, sends, unit="row", group=comm))
    x = torch.ones(3, requires_grad=True)
    out, work = at.all_to_all_v(x, [1, 2], [1 + rank] * 2, group=comm, async_op=True)
    work.wait()
    (out * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3, 3]


def test_first_calls_are_checked(grouped: Grouped) -> None:
    """Breaches and failures of the first calls are errors on every rank; then a failing rank ends the communicator."""
    domain = "domain 'torch-views'"

    def run(rank: int, size: int, comm: Any) -> list[str]:
        x, out, one = torch.arange(float(size)), torch.full((size,), -1.0), [1] * size
        places, same = list(range(size)), [size] * size

        def exchange(sends: list[int] = one, x: torch.Tensor = x, name: str = "float32", **more: Any) -> Any:
            return comm.exchange("all_to_all_v", name, out, x, (sends, places, one, places), **more).run()

        def reduce(op: str) -> None:
            comm.reduce("all_reduce", "int16", torch.empty(size * size).short(), x.short(), op, same, x.shape).run()

        texts = []
        zero = [0] * size
        for kind, attempt in (
            (PeerMismatchError, lambda: exchange(zero if rank == 1 else one)),
            (PeerMismatchError, lambda: exchange(x=x.int(), name="int32") if rank == 1 else exchange()),
            (PeerMismatchError, lambda: learn(comm, x, [2] * size) if rank == 1 else exchange()),
            (InvalidTensorError, lambda: fail(comm) if rank == 1 else exchange()),
            (PeerMismatchError, lambda: reduce("max" if rank == 1 else "sum")),
        ):
            with pytest.raises(kind) as caught:
                attempt()
            assert (out == -1).all()
            text = str(caught.value)
            texts.append(text.removeprefix(f"operator #4 all_to_all_v of {domain} failed on rank 1: "))
        for _ in range(FIRST):
            exchange()
        assert out.tolist() == [rank] * size
        stats = comm.stats()
        assert (stats["operators"], stats["failed_operators"], stats["bytes_nccl"]) == (FIRST, 5, FIRST * size * 4)
        dist.barrier()
        with pytest.raises(InvalidTensorError if rank == 1 else PeerLostError, match="the test made it so"):
            fail(comm) if rank == 1 else wait_until_ended(comm, exchange)
        assert not comm.usable
        record = comm.flight_record()["ranks"][0]["operators"]
        assert [one["state"] for one in record[:6]] == ["failed"] * (5 - (rank == 1)) + ["done"] * (1 + (rank == 1))
        return texts

    def fail(comm: Any) -> None:
        error = InvalidTensorError("the test made it so")
        comm.fail("all_to_all_v", error)
        raise error

    def learn(comm: Any, x: torch.Tensor, sends: list[int]) -> None:
        comm.learn("all_to_all_v", "float32", x, sends, list(range(comm.size))).run()

    def wait_until_ended(comm: Any, call: Any) -> None:
        while comm.usable:
            time.sleep(0.01)
        call()

    found = grouped(3, views)(run)
    assert found[0] == found[1] == found[2]
    head = f"operator #{{}} of {domain}: rank 0 {{}}, rank 1 {{}} [A2A-3009]".format
    assert found[0] == [
        f"operator #1 all_to_all_v of {domain}: rank 1 sends 0 elements to rank 0, which expects 1 [A2A-3010]",
        head(2, "has dtype float32", "has dtype int32"),
        f"operator #3 all_to_all_v of {domain}: rank 1 sends 2 elements to rank 0, which expects 1 [A2A-3010]",
        "the test made it so",
        head(5, "reduces with sum", "reduces with max"),
    ]


@on_ranks(2, communicator=False)
def test_ranks_in_trouble(rank: int, size: int, file: str) -> None:
    """One that is late, that leaves, that aborts, that breaks off, and a forked child."""
    one = torch.ones(size), [1] * size, [1] * size

    def exchange(comm: Any) -> torch.Tensor:
        return at.all_to_all_v(*one, group=comm)

    with views(rank, size, file, timeout=1.0) as comm:
        if rank == 1:
            while comm.on_host.usable:
                time.sleep(0.01)
        late = r"waited \d+\.\d s in operator #1 all_to_all_v of domain 'torch-views' for rank 1 \(pid "
        with pytest.raises(CommTimeoutError, match=late):
            exchange(comm)
    with views(rank, size, file + "2") as comm:
        exchange(comm)
        child = os.fork()
        if child == 0:
            try:
                exchange(comm)
            except BackendUnavailableError:
                os._exit(int(comm.usable))
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        at.barrier(comm)
        if rank == 0:
            comm.destroy()
        else:
            with pytest.raises(PeerLostError, match="rank 0"):
                exchange(comm)
    with views(rank, size, file + "3") as comm:
        for _ in range(FIRST):
            exchange(comm)
        dist.barrier()
        if rank == 1:
            breaks = mock.patch.object(dist, "all_to_all", side_effect=RuntimeError("the engine says so"))
            with breaks, pytest.raises(RuntimeError, match="the engine says so"):
                exchange(comm)
        else:
            while comm.usable:
                time.sleep(0.01)
            with pytest.raises(PeerLostError, match="it interrupted all_to_all_v: the engine says so"):
                exchange(comm)


@on_group(1, views)
def test_host_tensors_are_refused_by_the_front_end(rank: int, size: int, comm: Any) -> None:
    on_a_device = mock.patch.object(type(comm), "reaches_host", False)
    text = "the tensors lie on cpu, expected a device of nccl"
    with on_a_device, pytest.raises(InvalidTensorError, match=text):
        at.all_to_all_v(torch.ones(1), [1], [1], group=comm)


@on_group(2, views)
def test_an_engine_that_cannot_be_asked_disturbs_no_other_call(rank: int, size: int, comm: Any) -> None:
    """As CUDA refuses to tell whether a call is done while a graph is captured."""

    class Silent:
        def is_completed(self) -> bool:
            raise RuntimeError("operation not permitted when stream is capturing")

        def wait(self) -> None:
            raise RuntimeError("the engine has failed")

    x, ones = torch.full((2,), float(rank)), [1] * size
    with mock.patch.object(type(comm), "_launch_exchange", return_value=Silent()):
        kept = at.all_to_all_v(x, ones, ones, group=comm, async_op=True)[1]
    out, work = at.all_to_all_v(x, ones, ones, async_op=True)  # of the default group, in host memory
    work.wait()
    assert out.tolist() == [0.0, 1.0]
    with pytest.raises(RuntimeError, match="the engine has failed"):
        kept.wait()
