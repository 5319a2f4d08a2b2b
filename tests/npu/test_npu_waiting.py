"""Waits for the device and for peers end in time, with an error that explains why; so does what cannot be asked."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from npu_ranks import caught, communicator, emulated, ended, meet, use_device, wait_at_most
from npu_starts import exchange_works
from on_ranks import on_ranks
from started import wait_for_ranks

import alltoallv.torch as at
from alltoallv import Communicator, _core
from alltoallv.errors import CommTimeoutError, DeadlockError, HcclError, PeerLostError
from alltoallv.testing import Ranks


def ones(comm: Any) -> list[int]:
    return [1] * comm.size


def start(comm: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    result: tuple[torch.Tensor, Any] = at.all_to_all_v(x, ones(comm), ones(comm), group=comm, async_op=True)
    return result


@pytest.mark.parametrize("limit", ["the call's", "the communicator's"])
@on_ranks(2, communicator=False, fresh=True, env={"HCCL_EXEC_TIMEOUT": "8"})
def test_gathered_exchanges_end_in_time_when_a_rank_is_late(rank: int, size: int, limit: str) -> None:
    """They wait for the counts of all ranks on the host: not for as long as HCCL does."""
    device = use_device(rank)
    meet()
    timeout = 30.0 if limit == "the call's" else 5.0
    with emulated(faults="HcclAlltoAllV=zeros"):
        comm = Communicator.from_env(backend="hccl", timeout=timeout, check="off")
    assert comm.stats()["falls_back"] == 1
    x, y = torch.zeros(size).to(device), torch.zeros(size).to(device)
    torch.npu.synchronize()
    begin = time.monotonic()
    if rank == 0:
        places = list(range(size))
        plan = _core.Plan(comm.core, "all_to_all_v", "float32", ones(comm), places, ones(comm), places)
        calls = {
            "the call's": lambda: plan.run(x.data_ptr(), y.data_ptr(), 2.0),
            "the communicator's": lambda: at.all_to_all_v(x, ones(comm), ones(comm), group=comm),
        }
        with pytest.raises(CommTimeoutError, match="a rank is late or gone"):
            calls[limit]()
        assert time.monotonic() - begin < 15
    else:
        ended(comm)
    with pytest.raises(PeerLostError, match=r"rank 0 aborted|has ended"):
        at.all_to_all_v(x, ones(comm), ones(comm), group=comm)


def test_gathered_exchanges_end_when_a_rank_is_lost(ranks: Ranks, tmp_path: Path) -> None:
    def check(rank: int, size: int) -> str:
        device = use_device(rank)
        with emulated(faults="HcclAlltoAllV=zeros"):
            comm = Communicator.from_env(backend="hccl", timeout=40, check="off")
        exchange_works(comm, device)
        wait_for_ranks(str(tmp_path / "met"), rank, 0, 1)
        if rank == 1:
            time.sleep(1)  # the other one waits by then
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        error = caught(lambda: exchange_works(comm, device))
        assert time.monotonic() - begin < 20
        assert not comm.usable
        return f"{type(error).__name__}: {error}"

    env = {"HCCL_EXEC_TIMEOUT": "25"}
    first, lost = ranks(2, communicator=False, fresh=True, outcomes=True, env=env)(check)
    assert first.error is None, first
    assert lost.exit_code == -signal.SIGKILL
    assert first.result.startswith(("PeerLostError", "HcclError"))
    assert "rank 1 was lost" in first.result or "HCCL_E_REMOTE" in first.result  # whoever notices first


def test_an_event_that_cannot_be_asked_for_is_an_error(ranks: Ranks) -> None:
    trouble = HcclError, PeerLostError  # one's own, or that of a peer who met it first and says so

    def check(rank: int, size: int) -> None:
        ways = {"exception": asked, "wait": waited_for, "next": launched_behind, "destroy": destroyed_behind}
        for name, way in ways.items():
            with communicator(rank, domain=name) as (comm, device):
                x = torch.full((size,), float(rank)).to(device)
                start(comm, x)[1].wait(20)
                way(comm, x)
                assert not comm.usable

    def asked(comm: Communicator, x: torch.Tensor) -> None:
        work = start(comm, x)[1]
        torch.npu.synchronize()  # before torch_npu has recorded the event, it asks nobody
        with failing():
            assert "the NPU cannot report" in str(work.exception())
            assert "507000" in str(work.exception())
            assert not work.is_success()
        with pytest.raises(trouble, match="NPU"):  # once is enough
            work.wait()
        assert isinstance(work.exception(), trouble)

    def waited_for(comm: Communicator, x: torch.Tensor) -> None:
        _, work = start(comm, x)
        with failing(), pytest.raises(trouble, match="NPU"):
            work.wait(20)

    def launched_behind(comm: Communicator, x: torch.Tensor) -> None:
        kept, out = start(comm, x), torch.empty_like(x)  # torch_npu asks for the events of memory that is let go
        with failing(), pytest.raises(trouble, match="aclrtQueryEventStatus returned 507000"):
            at.all_to_all_v(x, ones(comm), ones(comm), out=out, group=comm)
        del kept

    def destroyed_behind(comm: Communicator, x: torch.Tensor) -> None:
        start(comm, x)
        torch.npu.synchronize()
        begin = time.monotonic()
        with failing():
            comm.destroy()
        assert time.monotonic() - begin < 15  # and not the communicator's 30

    def failing() -> Any:
        return emulated(faults="aclrtQueryEvent*=fail:507000")

    ranks(2, communicator=False, fresh=True)(check)


@on_ranks(2, communicator=False, fresh=True)
def test_communicators_used_in_another_order_on_each_rank(rank: int, size: int) -> None:
    """That is right for calls that are not compared. Those that are block their callers: an error in time."""
    device = use_device(rank)
    x = torch.full((size,), float(rank)).to(device)
    comms = [Communicator.from_env(name, backend="hccl", timeout=30) for name in ("one", "two")]
    for comm in comms:
        for _ in range(8):
            exchange_works(comm, device)
    for _ in range(3):
        calls = [start(comm, x) for comm in (comms if rank == 0 else comms[::-1])]
        for y, work in calls:
            work.wait()
            assert y.cpu().tolist() == list(range(size))
    for comm in comms:
        comm.destroy()
    comms = [Communicator.from_env(name, backend="hccl", timeout=30) for name in ("three", "four")]
    for comm in comms:
        wait_at_most(comm, 2.0)
    in_vain(rank, [lambda comm=comm: start(comm, x) for comm in comms])


def in_vain(rank: int, calls: list[Callable[[], Any]]) -> None:
    """Starts them in an order of this rank's own: a deadlock, where the ranks see each other's waits. Else the first
    whose time is up ends for both; the other may succeed, or begin so late that the data do not come in time.
    """
    begin, errors = time.monotonic(), []
    for call in calls if rank == 0 else calls[::-1]:
        try:
            call()
        except (CommTimeoutError, DeadlockError, PeerLostError) as error:
            errors.append(str(error))
    assert time.monotonic() - begin < 20
    assert errors
    late = r"rank \d waited \d\.\d s in operator #\d .*for (rank \d \(pid|its peers' data)"
    circle = r"ranks wait for each other: rank \d waits in .* for rank \d, which waits in .*"
    for text in errors:
        assert re.search(f"{late}|{circle}", text), text
