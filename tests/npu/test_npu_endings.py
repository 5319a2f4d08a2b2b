"""Communicators on NPUs that end with work left, in a forked child, or by an abort; and tensors of other devices."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from npu_ranks import caught_or, communicator, emulated, exchange, group, use_device, wait_for, zeros
from on_ranks import on_ranks
from started import wait_for_ranks

import alltoallv.torch as at
from alltoallv import Communicator, _core
from alltoallv.errors import BackendUnavailableError, CommTimeoutError, InvalidTensorError, PeerLostError
from alltoallv.testing import Ranks


@on_ranks(2, communicator=False)
def test_destroyed_with_much_left_to_do(rank: int, size: int) -> None:
    """Longer than HCCL's refusal is met with patience: what is healthy is waited for."""
    device = use_device(rank)
    comm = Communicator.from_env(backend="hccl", timeout=30)
    x = torch.full((size,), 1.0 + rank).to(device)
    torch.npu.synchronize()
    with emulated(task_delay_us=6_000_000):
        y = at.all_to_all_v(x, [1] * size, [1] * size, group=comm)
    comm.destroy()
    assert y.cpu().tolist() == [1.0 + j for j in range(size)]


def test_what_is_stuck_on_the_device_is_left_there(ranks: Ranks, tmp_path: Path) -> None:
    """To free its stream would mean to wait for HCCL's own time limit."""

    def check(rank: int, size: int, done: Path) -> None:
        device = use_device(rank)
        comm = Communicator.from_env(backend="hccl", timeout=20, check="off")
        x, y = zeros(size, device), zeros(size, device)
        torch.npu.synchronize()
        plan = _core.Plan(comm.core, "all_to_all_v", "float32", *([1] * size, list(range(size))) * 2)
        if rank == 0:
            with pytest.raises(CommTimeoutError):
                plan.run(x.data_ptr(), y.data_ptr(), 1.0)
            start = time.monotonic()
            caught_or(comm.destroy)
            del plan, comm
            assert time.monotonic() - start < 10
            done.touch()
        else:
            wait_for(done)

    ranks(2, communicator=False, fresh=True, env={"HCCL_EXEC_TIMEOUT": "20", "PYTHONFAULTHANDLER": "1"})(
        check, tmp_path / "done"
    )


@on_ranks(2, communicator=False, fresh=True)
def test_a_forked_child_leaves_it_alone(rank: int, size: int) -> None:
    import gc
    import os
    import signal

    device = use_device(rank)
    comm = Communicator.from_env(backend="hccl", timeout=20)
    exchange(comm, device)
    child = os.fork()
    if child == 0:
        signal.alarm(15)  # ends it if it hangs
        told = ""
        try:
            comm.core.reduce("all_reduce", "float32", "sum", 0, 0, [0])
        except BackendUnavailableError as error:
            told = str(error)
        usable = comm.usable
        del comm
        gc.collect()
        os._exit(0 if "before fork" in told and not usable else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert exchange(comm, device) == list(range(size))
    comm.destroy()


@on_ranks(2, communicator=False, fresh=True)
def test_tensors_on_another_device(rank: int, size: int, file: str) -> None:
    """The peers hear of it, and all go on."""
    with group(rank, size, file, backend="gloo") as (world, device):
        comm = at.from_group(world, device="npu", timeout=20)
        exchange(comm, device)
        other = use_device(rank + size) if rank == 1 else device  # the communicator was made for another
        with pytest.raises(InvalidTensorError, match="expected npu:1"):
            exchange(comm, other)
        use_device(rank)
        exchange(comm, device)


@on_ranks(2, communicator=False)
def test_abort_and_use_after_destroy(rank: int, size: int) -> None:
    device = use_device(rank)
    comm = Communicator.from_env('experts "a"', backend="hccl", timeout=20)
    exchange(comm, device)
    if rank == 0:
        comm.abort("enough")
    else:
        time.sleep(0.5)
    with pytest.raises(PeerLostError, match="enough"):
        exchange(comm, device)
    comm.destroy()
    with pytest.raises(ValueError, match="destroyed"):
        exchange(comm, device)
    with communicator(rank) as (fresh, _):
        assert exchange(fresh, device) == list(range(size))
    record = comm.flight_record()
    assert record["domain"] == comm.domain
    first = record["ranks"][0]["operators"][0]
    assert (first["operator"], first["state"], first["bytes"]) == ("all_to_all_v", "done", size * 4)
    assert first["start_ns"] <= first["end_ns"]


def test_a_death_is_told_at_once(ranks: Ranks, tmp_path: Path) -> None:
    """On stderr, while the other rank is in no call."""

    def check(rank: int, size: int) -> str:
        import os
        import signal

        use_device(rank)
        comm = Communicator.from_env(backend="hccl", timeout=30)
        read, write = os.pipe()
        os.dup2(write, 2)
        at.barrier(group=comm)
        wait_for_ranks(str(tmp_path / "met"), rank, 0, 1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with os.fdopen(read) as told:
            return told.readline()

    survivor, _ = ranks(2, communicator=False, fresh=True, outcomes=True)(check)
    assert survivor.error is None, survivor.report()
    assert survivor.result.startswith("alltoallv: domain 'default"), survivor.result
    assert "rank 1 was lost: " in survivor.result
