"""Every misbehaviour of HCCL that the emulator knows: the right error on every rank, or the right result."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from npu_ranks import (
    caught,
    caught_or,
    communicator,
    emulated,
    exchange,
    group,
    use_device,
    wait_at_most,
    wait_for,
    zeros,
)
from on_ranks import on_ranks

import alltoallv.torch as at
from alltoallv import Communicator, _core
from alltoallv.errors import CommTimeoutError, HcclError, PeerLostError, PeerMismatchError
from alltoallv.testing import Ranks


@on_ranks(2, communicator=False)
def test_late_tasks_change_nothing(rank: int, size: int) -> None:
    with communicator(rank) as (comm, device), emulated(faults="HcclAlltoAllV=delay:200"):
        works = []
        for n in range(3):
            x = torch.full((size,), 10.0 * n + rank).to(device)
            works.append(at.all_to_all_v(x, [1] * size, [1] * size, group=comm, async_op=True))
        for n, (y, work) in enumerate(works):
            work.wait()
            assert y.cpu().tolist() == [10.0 * n + j for j in range(size)]
        assert exchange(comm, device) == list(range(size))


def test_a_call_that_fails_ends_the_communicator_for_all(ranks: Ranks) -> None:
    """On rank 1; the others have launched and learn of it at their next call at the latest."""

    def check(rank: int, size: int, numbers: list[tuple[int, str, int]]) -> None:
        for turn, (number, name, code) in enumerate(numbers):
            # Another device: torch refuses one whose stream has failed.
            check_one(rank, size, use_device(rank + size * turn), number, name, code)

    def check_one(rank: int, size: int, device: torch.device, number: int, name: str, code: int) -> None:
        comm = Communicator.from_env(backend="hccl", timeout=20)
        assert exchange(comm, device) == list(range(size))
        x = zeros(size, device)
        if rank == 1:
            with emulated(faults=f"HcclAlltoAllV=fail:{number}"):
                error = caught(lambda: exchange(comm, device))
            assert isinstance(error, HcclError)
            assert error.code == code
            for part in ("operator #2 all_to_all_v", "HcclAlltoAllV", str(number), f"HCCL_E_{name}"):
                assert part in str(error)
            if name == "OOM":
                assert "HCCL_BUFFSIZE" in str(error)
        else:
            # Launched into the void: HCCL's own time must pass before the device gives up.
            caught_or(lambda: at.all_to_all_v(x, [1] * size, [1] * size, group=comm))
        time.sleep(0.2)
        error = caught(lambda: at.all_to_all_v(x, [1] * size, [1] * size, group=comm))
        assert isinstance(error, PeerLostError | HcclError)
        assert "rank 1" in str(error) or rank == 1
        assert not comm.usable
        comm.destroy()

    numbers = [(1, "PARA", 1), (4, "INTERNAL", 25), (24, "OOM", 26)]
    ranks(2, communicator=False, fresh=True, env={"HCCL_EXEC_TIMEOUT": "2"})(check, numbers)


def test_an_error_behind_the_call_is_asked_for(ranks: Ranks) -> None:
    """HcclGetCommAsyncError: before the next launch, by a work, and where the host waits for its own stream."""

    def check(rank: int, size: int) -> None:
        ways = {"launch": next_launch, "work": asynchronous, "future": future, "host": on_the_host}
        for turn, (name, way) in enumerate(ways.items()):
            device = use_device(rank + size * turn)  # torch refuses one whose stream has failed
            comm = Communicator.from_env(name, backend="hccl", timeout=20)
            exchange(comm, device)
            x = zeros(size, device)
            torch.npu.synchronize()
            with emulated(faults="HcclAlltoAllV=async:21"):
                text = str(way(comm, x))
            assert "HcclGetCommAsyncError returned 21 (HCCL_E_REMOTE" in text, (name, text)
            if name == "host":
                assert not comm.usable
            comm.destroy()

    def next_launch(comm: Communicator, x: torch.Tensor) -> Exception:
        ones = [1] * comm.size
        for _ in range(100):
            error = caught_or(lambda: at.all_to_all_v(x, ones, ones, group=comm))
            if isinstance(error, Exception):
                assert isinstance(error, HcclError | PeerLostError)  # the latter where a peer has told of its own
                return error
            time.sleep(0.1)  # the device may come to the call before late
        raise AssertionError("nothing was raised")

    def asynchronous(comm: Communicator, x: torch.Tensor) -> Exception:
        ones = [1] * comm.size
        _, work = at.all_to_all_v(x, ones, ones, group=comm, async_op=True)
        error = caught(lambda: work.wait(10))
        assert isinstance(error, HcclError | PeerLostError)
        assert work.is_completed()
        assert not work.is_success()
        assert "HCCL_E_REMOTE" in str(work.exception())
        return error

    def future(comm: Communicator, x: torch.Tensor) -> Exception:
        ones = [1] * comm.size
        _, work = at.all_to_all_v(x, ones, ones, group=comm, async_op=True)
        return caught(lambda: work.get_future().wait())

    def on_the_host(comm: Communicator, x: torch.Tensor) -> Exception:
        ones, places = [1] * comm.size, list(range(comm.size))
        plan = _core.Plan(comm.core, "all_to_all_v", "float32", ones, places, ones, places)
        out = torch.empty_like(x)
        error = caught(lambda: plan.run(x.data_ptr(), out.data_ptr()))
        assert isinstance(error, HcclError)
        return error

    ranks(2, communicator=False, fresh=True)(check)


def test_a_rank_dies_while_data_move(ranks: Ranks) -> None:
    def check(rank: int, size: int) -> str:
        device = use_device(rank)
        comm = Communicator.from_env(backend="hccl", timeout=20)
        exchange(comm, device)
        if rank == 1:
            import alltoallv_emulator as emulator

            emulator.set_option("faults", "HcclAlltoAllV=die")
        start = time.monotonic()
        caught_or(lambda: exchange(comm, device))
        time.sleep(0.3)
        error = caught(lambda: exchange(comm, device))
        assert time.monotonic() - start < 15
        assert not comm.usable
        return f"{type(error).__name__}: {error}"

    outcomes = ranks(3, communicator=False, fresh=True, outcomes=True, env={"HCCL_EXEC_TIMEOUT": "3"})(check)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome
        assert "rank 1" in outcome.result


@on_ranks(2, communicator=False)
def test_a_rank_that_comes_too_late_is_a_timeout_that_names_it(rank: int, size: int) -> None:
    device = use_device(rank)
    comm = Communicator.from_env(backend="hccl", timeout=30)
    wait_at_most(comm, 2.0)
    if rank == 0:
        with pytest.raises(CommTimeoutError, match="rank 1"):
            exchange(comm, device)
    else:
        while comm.usable:  # until the timeout of the other
            time.sleep(0.01)
        with pytest.raises((CommTimeoutError, PeerLostError)):
            exchange(comm, device)
    comm.destroy()


def test_a_rank_leaves_out_a_call_after_the_checked_ones(ranks: Ranks, tmp_path: Path) -> None:
    """Nothing is compared then: HCCL's time limit ends it."""

    def check(rank: int, size: int, done: Path) -> None:
        device = use_device(rank)
        comm = Communicator.from_env(backend="hccl", timeout=20)
        x = zeros(size, device)
        for _ in range(8):
            exchange(comm, device)
        if rank == 0:
            error = caught(lambda: exchange(comm, device))
            assert not isinstance(error, AssertionError)
            with pytest.raises(HcclError, match="HCCL_E_"):
                at.all_to_all_v(x, [1] * size, [1] * size, group=comm)
            assert not comm.usable
            done.touch()
        else:
            wait_for(done)
        comm.destroy()

    ranks(2, communicator=False, fresh=True, env={"HCCL_EXEC_TIMEOUT": "2"})(check, tmp_path / "done")


@on_ranks(2, communicator=False)
def test_own_checks_fail_after_the_checked_calls(rank: int, size: int) -> None:
    device = use_device(rank)
    comm = Communicator.from_env(backend="hccl", timeout=20)
    for _ in range(8):
        exchange(comm, device)
    if rank == 1:
        with pytest.raises(ValueError, match="send_counts"):
            at.all_to_all_v(torch.zeros(2).to(device), [3, 1], [1, 1], group=comm)
    else:
        while comm.usable:
            time.sleep(0.01)
        with pytest.raises(PeerLostError, match="send_counts"):
            exchange(comm, device)
    comm.destroy()


@on_ranks(2, communicator=False, fresh=True, env={"HCCL_EXEC_TIMEOUT": "2"})
def test_counts_that_nobody_compares(rank: int, size: int) -> None:
    """HCCL refuses or gives up: an error on every rank, and then for good."""
    device = use_device(rank)
    comm = Communicator.from_env(backend="hccl", timeout=20, check="off")
    x = zeros(2 * size, device)
    torch.npu.synchronize()
    recvs = [2] * size if rank else [1] * size
    with pytest.raises((HcclError, PeerLostError, RuntimeError)):
        at.all_to_all_v(x, [2] * size, recvs, group=comm).cpu()
    with pytest.raises((HcclError, PeerLostError)):
        at.all_to_all_v(x, [2] * size, [2] * size, group=comm)
    assert not comm.usable
    comm.destroy()


@on_ranks(1, communicator=False, fresh=True)
def test_counts_of_one_rank_for_itself(rank: int, size: int) -> None:
    """HCCL is not asked: its output would be written beyond its end."""
    with communicator(rank, check="off") as (comm, device):
        out = zeros(10, device)
        with pytest.raises(PeerMismatchError, match="rank 0 sends 10 elements to itself and expects 3"):
            at.all_to_all_v(torch.ones(10).to(device), [10], [3], out=out[:3], group=comm)
        assert out.cpu().tolist() == [0] * 10
        assert at.all_to_all_v(torch.ones(2).to(device), [2], [2], group=comm).cpu().tolist() == [1, 1]


@on_ranks(2, communicator=False, fresh=True, env={"HCCL_EXEC_TIMEOUT": "2"})
def test_a_failing_call_in_a_group(rank: int, size: int, file: str) -> None:
    with group(rank, size, file, backend="gloo") as (world, device):
        comm = at.from_group(world, device="npu", timeout=20)
        exchange(comm, device)
        if rank == 1:
            with emulated(faults="HcclAlltoAllV=fail:4"), pytest.raises(HcclError, match="HCCL_E_INTERNAL"):
                exchange(comm, device)
        else:
            caught_or(lambda: exchange(comm, device))
        dist.barrier()
        with pytest.raises(PeerLostError, match=r"HCCL_E_INTERNAL|rank 1"):
            exchange(comm, device)


@on_ranks(2, communicator=False)
def test_a_mistake_that_one_rank_alone_makes(rank: int, size: int, file: str) -> None:
    """Among the compared calls, the last of them included: the calls that it makes then meet the other's calls."""
    with group(rank, size, file, backend="gloo") as (world, device):
        comm = at.from_group(world, device="npu", timeout=20)
        for step in range(10):
            if rank == 1 and step in (1, 2, 5):
                with pytest.raises(ValueError, match="recv_counts"):
                    at.all_to_all_v(torch.zeros(2).to(device), [1, 1], [-1, 1], group=comm)
            at.all_reduce(x := torch.full((3,), step + 1.0).to(device), group=comm)
            assert x.tolist() == [2 * (step + 1.0)] * 3
        assert comm.stats()["agreed_operators"] == 5
