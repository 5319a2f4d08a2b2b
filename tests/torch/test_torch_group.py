"""Which engine carries a group of torch.distributed, and how its ranks meet."""

from __future__ import annotations

import logging
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from backend_groups import on_group
from engine_groups import logged
from started import check_grown_groups, wait_for_ranks

import alltoallv.torch as at
from alltoallv.errors import (
    BackendUnavailableError,
    CommTimeoutError,
    InvalidParamError,
    PeerLostError,
    PeerMismatchError,
)
from alltoallv.testing import Ranks
from alltoallv.torch.engines import rendezvous
from alltoallv_tools.ports import free_port


@on_group(2, backend="gloo")
def test_who_carries_a_group(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """An argument says it; there is one communicator per kind of device; what ranks want must agree."""
    with logged(logging.INFO) as lines:
        auto = at.from_group(group)
        assert auto.backend == "shm"
        assert at.from_group(group) is auto
        again = at.from_group(group, backend="tcp", timeout=20)  # which needs no TCP on one host
    assert (again.backend, again is auto, lines) == ("shm", False, [])
    assert at.from_group(group, backend="tcp") is again
    assert at.all_to_all_v(torch.ones(2), [1, 1], group=again).tolist() == [1, 1]
    assert at.all_to_all_v(torch.ones(2), [1, 1]).tolist() == [1, 1]
    assert (auto.stats()["operators"], again.stats()["operators"]) == (1, 1)

    for backend in ("smoke", "gloo", "mpi"):
        with pytest.raises(
            InvalidParamError, match=rf"backend is '{backend}', expected one of auto, shm, tcp.*A2A-1429"
        ):
            at.from_group(group, backend=backend)
    with pytest.raises(BackendUnavailableError, match=r"has 'gloo' for cpu tensors, expected 'nccl'.*A2A-5055"):
        at.from_group(group, backend="nccl")
    with pytest.raises(
        PeerMismatchError, match=r"rank 0 has cpu tensors over backend 'hccl', rank 1 has cpu.*A2A-3026"
    ):
        at.from_group(group, backend="hccl" if rank == 0 else "nccl")
    with pytest.raises(InvalidParamError, match=r"check is 'sometimes'.*A2A-1430"):
        at.from_group(group, backend="shm", check="sometimes", device="meta")

    again.destroy()
    assert not again.usable
    with pytest.raises(InvalidParamError, match=r"has been destroyed.*A2A-1477"):
        at.all_to_all_v(torch.ones(2), [1, 1], group=again)
    anew = at.from_group(group, backend="tcp", timeout=20)  # in place of the old one
    assert anew is not again
    assert at.all_to_all_v(torch.ones(2), [1, 1], group=anew).tolist() == [1, 1]


@on_group(2, backend="gloo")
def test_a_variable_chooses_the_engine(rank: int, size: int, group: dist.ProcessGroup) -> None:
    with mock.patch.dict(os.environ, ALLTOALLV_TORCH_BACKEND="smoke"):
        with pytest.raises(
            InvalidParamError, match=r"ALLTOALLV_TORCH_BACKEND is 'smoke', expected one of auto, shm.*A2A-1429"
        ):
            at.all_reduce(torch.ones(2))
        auto = at.from_group(group, backend="auto")  # an argument comes before it
    with mock.patch.dict(os.environ, ALLTOALLV_TORCH_BACKEND="tcp"):
        at.all_reduce(x := torch.ones(2), group=group)
        assert x.tolist() == [2, 2]
        forced = at.from_group(group)
    assert forced is at.from_group(group, backend="tcp")
    assert (auto.stats()["operators"], forced.stats()["operators"]) == (0, 1)


@on_group(2, backend="gloo")
def test_ranks_without_a_store(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """As ranks of MPI, which can hand everybody what all give."""

    def gather(mine: bytes) -> list[bytes]:
        heard: list[bytes] = [b""] * size
        dist.all_gather_object(heard, mine, group)
        return heard

    peers = rendezvous.meet_over(gather, device="cpu")
    assert [one["device"] for one in peers.who] == ["cpu"] * size
    with rendezvous.connect(peers, gather, rank, size, "no store", 20) as comm:
        assert at.all_to_all_v(torch.ones(2), [1, 1], group=comm).tolist() == [1, 1]


@on_group(2, backend="gloo")
def test_rank_that_never_joins(rank: int, size: int, group: dist.ProcessGroup) -> None:
    if rank == 0:
        with (
            mock.patch.dict(os.environ, ALLTOALLV_WARN_AFTER="0.3"),
            logged(logging.WARNING) as lines,
            pytest.raises(CommTimeoutError, match=r"rank 0 of group '.*' waited 1.0 s for rank 1 to join"),
        ):
            at.from_group(group, backend="tcp", timeout=1.0)
        assert "has waited 0." in lines[0], lines
        assert lines[0].endswith("s for rank 1 to join")
    dist.barrier()


def test_a_rank_that_dies_before_the_groups_first_call(ranks: Ranks, tmp_path: Path) -> None:
    """The others, which have met it in another group, do not wait in the store for the timeout."""

    def work(rank: int, size: int, file: str) -> None:
        store = dist.FileStore(file, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        at.all_reduce(torch.ones(3))
        group = dist.new_group([0, 1, 2])
        wait_for_ranks(f"{file}-met", rank, 0, 1, 2)
        if rank == 2:
            time.sleep(0.3)  # the others wait by then
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(PeerLostError, match=r"rank 2 \(pid .*\) was lost before it joined"):
            at.all_reduce(torch.ones(3), group=group)
        assert time.monotonic() - begin < 30
        wait_for_ranks(file, rank, 0, 1)  # not another one that has ended by now

    outcomes = ranks(3, communicator=False, fresh=True, outcomes=True)(work, str(tmp_path / "file"))
    assert [outcome.error is None for outcome in outcomes] == [True, True, False], outcomes


def test_a_rank_that_ends_as_soon_as_a_meeting_has_failed(ranks: Ranks) -> None:
    """Rank 0 has the store, in which the other one reads why."""

    def work(rank: int, size: int, port: int) -> None:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        if rank == 0:
            time.sleep(0.3)  # the other one looks seldom by then
        with pytest.raises(PeerMismatchError, match="rank 0 has cpu tensors over backend 'shm', rank 1 has cpu"):
            at.from_group(dist.group.WORLD, backend="shm" if rank == 0 else "tcp")
        os._exit(7)

    outcomes = ranks(2, communicator=False, fresh=True, outcomes=True)(work, free_port())
    assert [outcome.exit_code for outcome in outcomes] == [7, 7], outcomes


@pytest.mark.parametrize("backend", ["gloo", pytest.param("alltoallv", marks=pytest.mark.slow)])
def test_groups_beside_a_communicator_that_has_grown(backend: str) -> None:
    check_grown_groups("torch", backend)
