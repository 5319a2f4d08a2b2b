"""Ranks on several hosts, which share no memory: they agree over TCP, however they were started.

The hosts are processes here; nothing but the names of the launcher's variables tells them that they share one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from npu_ranks import caught, ended, moved, use_device
from npu_starts import exchange_works, hccl_comm, start_as_msrun, write_table
from on_ranks import on_ranks
from started import wait_for_ranks

import alltoallv.torch as at
from alltoallv import AllToAllVParam, Communicator
from alltoallv.atb.operations import connect
from alltoallv.errors import InvalidParamError, PeerMismatchError
from alltoallv.testing import Ranks
from alltoallv.testing.golden import assert_bits_equal, random_case
from alltoallv_tools.ports import free_port

SIZE = 4  # on two hosts
START = ("launcher", "rank table", "the caller's HcclComm")

Place = tuple[str, str, int]  # how they start, the rank table, the port of rank 0


def join(rank: int, size: int, place: Place, timeout: float = 30.0, domain: str = "hosts") -> Communicator:
    start, table, port = place
    start_as_msrun(rank, size, port - 1, ALLTOALLV_LOCAL_WORLD_SIZE=2 if size > 2 else 1)
    use_device(rank)
    if start == "the caller's HcclComm":
        _, handle = hccl_comm(rank, table)
        param = AllToAllVParam(rank=rank, rank_size=size, hccl_comm=handle.value, comm_domain=domain)
        comm = Communicator(connect(param, npu=True))
    else:
        if start == "rank table":
            os.environ["RANK_TABLE_FILE"] = table
        comm = Communicator.from_env(domain, backend="hccl", timeout=timeout)
    assert comm.core.control is not None
    assert comm.core.control.backend == "tcp"
    return comm


@pytest.fixture(params=START)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return request.param, write_table(tmp_path / "table.json", [2, 2]), free_port()


def device_of(comm: Communicator) -> torch.device:
    return torch.device(f"npu:{comm.rank}")


def exchange(comm: Communicator, sends: list[int], recvs: list[int] | None = None) -> torch.Tensor:
    x = torch.full((max(sum(sends), 1),), float(comm.rank)).to(device_of(comm))[: sum(sends)]
    y: torch.Tensor = at.all_to_all_v(x, sends, recvs, group=comm).cpu()
    return y


def works(comm: Communicator) -> None:
    exchange_works(comm, device_of(comm))


def test_what_ranks_disagree_about_is_an_error_on_all(ranks: Ranks, place: Place) -> None:
    """Before anything is launched: the communicator stays usable."""

    def check(rank: int, size: int, place: Place) -> list[str]:
        comm = join(rank, size, place)
        told = []

        def refused(kind: type[Exception], call: Callable[[], object]) -> None:
            error = caught(call)
            assert isinstance(error, kind), repr(error)
            told.append(str(error))

        recvs = [1] * size
        if rank == 2:
            recvs[1] = 3
        refused(PeerMismatchError, lambda: exchange(comm, [1] * size, recvs))
        assert "rank 1 sends 1 elements to rank 2, which expects 3" in told[-1]

        x = torch.zeros(size, dtype=torch.float16 if rank == 3 else torch.float32).to(device_of(comm))
        refused(PeerMismatchError, lambda: at.all_to_all_v(x, [1] * size, [1] * size, group=comm))
        assert "rank 0 has dtype float32, rank 3 has dtype float16" in told[-1]

        y = torch.zeros(size).to(device_of(comm))
        call = at.all_to_all_v if rank else lambda x, *_, group: at.all_to_all_single(x.clone(), x, group=group)
        refused(PeerMismatchError, lambda: call(y, [1] * size, [1] * size, group=comm))
        assert "rank 0 calls all_to_all_single, rank 1 calls all_to_all_v" in told[-1]

        sends = [1] * size if rank != 1 else [-1] * size
        refused(InvalidParamError, lambda: at.all_to_all_v(y, sends, [1] * size, group=comm))
        if rank != 1:
            assert "failed on rank 1" in told[-1]
        works(comm)
        assert comm.usable
        comm.destroy()
        return told[:3]

    texts = ranks(SIZE, communicator=False)(check, place)
    assert all(text == texts[0] for text in texts)


@on_ranks(SIZE, communicator=False)
def test_values_and_learnt_counts(rank: int, size: int, place: Place) -> None:
    comm = join(rank, size, place)
    device = device_of(comm)
    for seed, dtype in enumerate(("float32", "bool", "bfloat16")):
        case = random_case(np.random.default_rng(seed), size, dtype)
        assert_bits_equal(moved(case, rank, device, group=comm), case.expected[rank], dtype)
    # Nobody states what it expects: the peers tell, also beyond the calls that are compared.
    for n in range(8):
        sends = [(rank + j + n) % 3 for j in range(size)]
        expected = [float(j) for j in range(size) for _ in range((rank + j + n) % 3)]
        assert exchange(comm, sends).tolist() == expected
    comm.destroy()


def test_a_rank_dies(ranks: Ranks, tmp_path: Path) -> None:
    """After the calls that are compared: the others know at once, without HCCL's timeout."""

    def check(rank: int, size: int, place: Place) -> str:
        comm = join(rank, size, place)
        for _ in range(8):
            works(comm)
        wait_for_ranks(str(tmp_path / "met"), rank, *range(size))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ended(comm)
        error = caught(lambda: works(comm))
        return f"{type(error).__name__}: {error}"

    outcomes = ranks(3, communicator=False, fresh=True, outcomes=True)(check, ("launcher", "", free_port()))
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome
        assert outcome.result.startswith("PeerLostError")
        assert "rank 1 was lost" in outcome.result
