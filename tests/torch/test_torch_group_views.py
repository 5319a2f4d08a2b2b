"""NCCL's way in host memory: views per peer, agreement through the store for the first calls.

In place of NCCL, backend alltoallv of torch.distributed moves the views.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_groups import DTYPES, caught, to_numpy, to_torch, views
from test_torch_group import random_cases

import alltoallv.torch as at
from alltoallv.errors import CommTimeoutError, InvalidTensorError, PeerLostError, PeerMismatchError
from alltoallv.testing import Ranks, golden, reference
from alltoallv.torch.engines import rendezvous
from alltoallv.torch.engines.group import FIRST, TorchGroupCommunicator


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.mark.parametrize(("size", "check"), [(1, None), (2, None), (3, None), (3, "always")])
def test_random_exchanges(ranks: Ranks, file: str, size: int, check: str | None) -> None:
    """Given and learnt counts, at once and asynchronous, before and after the checked calls."""

    def run(rank: int, size: int, cases: list[golden.Case]) -> None:
        with views(rank, size, file, check=check) as comm:
            for number, case in enumerate(cases):
                x, name = to_torch(case.inputs[rank]), case.dtype.name
                sends, sdispls = case.send_counts[rank].tolist(), case.sdispls[rank].tolist()
                recvs, rdispls = case.recv_counts[rank].tolist(), case.rdispls[rank].tolist()
                out, expected = to_torch(case.outputs[rank]), case.expected[rank]
                if number % 3 == 2:
                    call = comm.learn("all_to_all_v", name, x, sends, sdispls)
                    expected = reference.all_to_all_v(case.inputs, case.send_counts, case.sdispls)[rank]
                else:
                    call = comm.exchange("all_to_all_v", name, out, x, (sends, sdispls, recvs, rdispls))
                if number % 2:
                    pending = call.submit()
                    assert pending.wait(20)
                    assert pending.done()
                    result = pending.result
                else:
                    result = call.run()
                if number % 3 == 2:
                    out, counts = result
                    assert counts == recvs
                golden.assert_bits_equal(to_numpy(out), expected, f"exchange {number}: {case!r}")

    ranks(size, communicator=False)(run, random_cases(size, 24))


def test_other_collectives(ranks: Ranks, file: str) -> None:
    def run(rank: int, size: int) -> None:
        with views(rank, size, file) as comm:
            for name in DTYPES:
                x = torch.arange(6).to(getattr(torch, name))
                outputs = [torch.empty(j + rank, dtype=x.dtype) for j in range(size)]
                inputs = [x[: rank + j].clone() for j in range(size)]
                comm.exchange_lists("all_to_all", name, outputs, inputs).run()
                for j, out in enumerate(outputs):
                    golden.assert_bits_equal(to_numpy(out), to_numpy(x[: rank + j]), name)
                gathered = torch.empty(6 * size, dtype=x.dtype)
                layout = ([6] * size, [0] * size, [6] * size, [6 * j for j in range(size)])
                comm.exchange("all_gather_into_tensor", name, gathered, x, layout).run()
                golden.assert_bits_equal(to_numpy(gathered), to_numpy(torch.cat([x] * size)), name)
                comm.broadcast(name, x, 1).run()
            x = torch.arange(6.0) + rank
            out = torch.empty(6)
            comm.reduce("all_reduce", "float32", out, x, "sum", [3, 3]).run()
            assert out.tolist() == [2.0 * i + 1 for i in range(6)]
            small = x.short()  # NCCL has no int16
            comm.reduce("all_reduce", "int16", (total := torch.empty_like(small)), small, "max", [3, 3]).run()
            assert total.tolist() == [1, 2, 3, 4, 5, 6]
            comm.barrier().run()

    ranks(2, communicator=False)(run)


def test_first_calls_are_checked(ranks: Ranks, file: str) -> None:
    """Breaches and failures of the first calls are errors on every rank; then a failing rank ends the communicator."""

    def run(rank: int, size: int) -> list[str]:
        with views(rank, size, file) as comm:
            x, out, one = torch.arange(float(size)), torch.full((size,), -1.0), [1] * size
            places = list(range(size))

            def exchange(sends: list[int] = one, x: torch.Tensor = x, name: str = "float32", **more: Any) -> Any:
                return comm.exchange("all_to_all_v", name, out, x, (sends, places, one, places), **more).run()

            texts = []
            zero = [0] * size
            for kind, attempt in (
                (PeerMismatchError, lambda: exchange(zero if rank == 1 else one)),
                (PeerMismatchError, lambda: exchange(x=x.int(), name="int32") if rank == 1 else exchange()),
                (PeerMismatchError, lambda: comm.barrier().run() if rank == 1 else exchange()),
                (InvalidTensorError, lambda: fail(comm) if rank == 1 else exchange()),
                (PeerMismatchError, lambda: learn(comm, x) if rank == 1 else exchange()),
            ):
                error = caught(attempt)
                assert isinstance(error, kind), error
                assert (out == -1).all()
                texts.append(str(error).removeprefix("operator #4 all_to_all_v of domain 'views' failed on rank 1: "))
            for _ in range(FIRST):
                exchange()
            assert out.tolist() == [rank] * size
            error = caught(lambda: fail(comm) if rank == 1 else comm.barrier().run())
            assert isinstance(error, InvalidTensorError if rank == 1 else PeerLostError)
            assert "the test made it so" in str(error)
            assert not comm.usable
            return texts

    def fail(comm: Any) -> None:
        error = InvalidTensorError("the test made it so")
        comm.fail("all_to_all_v", error)
        raise error

    def learn(comm: Any, x: torch.Tensor) -> None:
        comm.learn("all_to_all_v", "float32", x, [1] * comm.size, list(range(comm.size))).run()

    found = ranks(3, communicator=False)(run)
    assert found[0] == found[1] == found[2]
    head = "operator #{} of domain 'views': rank 0 {}, rank 1 {}".format
    assert found[0] == [
        "operator #1 all_to_all_v of domain 'views': rank 1 sends 0 elements to rank 0, which expects 1",
        head(2, "has dtype float32", "has dtype int32"),
        head(3, "calls all_to_all_v", "calls barrier"),
        "the test made it so",
        "operator #5 all_to_all_v of domain 'views': rank 1 learns its receive counts, rank 0 gives them, "
        "expected all or none where not every call is checked",
    ]


def test_ranks_that_are_late_and_leave(ranks: Ranks, file: str) -> None:
    """The store tells who has not posted a row."""

    def run(rank: int, size: int) -> None:
        with views(rank, size, file, timeout=1.0) as comm:
            if rank == 1:
                time.sleep(1.5)
            error = caught(lambda: comm.barrier().run())
            assert isinstance(error, CommTimeoutError)
            assert "waited 1.0 s in operator #1 barrier of domain 'views' for rank 1 (pid " in str(error)
        dist.init_process_group("alltoallv", store=dist.FileStore(file + "2", size), rank=rank, world_size=size)
        group = dist.group.WORLD
        raw = dist.distributed_c10d._world.pg_map[group][1]
        meeting = rendezvous.meet(raw, rank, size, "", 30)
        store = meeting.store(raw, rank, size)
        comm = TorchGroupCommunicator(group, "nccl", store, meeting.who, domain="views", timeout=30)
        comm.barrier().run()
        if rank == 0:
            comm.destroy()
        else:
            error = caught(lambda: comm.barrier().run())
            assert isinstance(error, PeerLostError)
            assert "rank 0 has left domain 'views'" in str(error)
        dist.destroy_process_group()

    ranks(2, communicator=False)(run)


def test_host_tensors_are_refused_by_the_front_end(ranks: Ranks, file: str) -> None:
    def run(rank: int, size: int) -> None:
        with views(rank, size, file) as comm:
            error = caught(lambda: at.all_to_all_v(torch.ones(1), [1], [1], group=comm))
            assert isinstance(error, InvalidTensorError)
            assert "the tensors lie on cpu, expected a device of nccl" in str(error)

    ranks(1, communicator=False)(run)
