"""Scenes for the waits of the host, which go wrong without them: `test_npu_synchronization` runs them."""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from npu_ranks import caught_or, communicator, emulated, use_device
from npu_starts import write_table

import alltoallv.torch as at
from alltoallv import AllToAllVParam, Communicator, _core
from alltoallv.atb.operations import connect
from alltoallv.torch.engines.hccl import leave_out_synchronizations

LATE = 100_000  # microseconds by which every task of a stream comes later


@contextlib.contextmanager
def left_out(names: str) -> Iterator[None]:
    leave_out_synchronizations(names)
    try:
        yield
    finally:
        leave_out_synchronizations("")


def self_check(rank: int, size: int, without: str) -> bool:
    """What a new communicator has tried is looked at when it has arrived: data, then the verdict of all."""
    use_device(rank)
    with emulated(task_delay_us=LATE), left_out(without):
        made = caught_or(lambda: Communicator.from_env(backend="hccl", timeout=30.0))
        torch.npu.synchronize()
    if not isinstance(made, Communicator):
        return False
    with made:
        return made.stats()["falls_back"] == 0


def self_check_of_a_reduction(rank: int, size: int, without: str) -> bool:
    with communicator(rank) as (comm, device):
        x, out = torch.ones(2 * size).to(device), torch.zeros(2 * size).to(device)
        torch.npu.synchronize()
        with emulated(task_delay_us=LATE), left_out(without):
            call = caught_or(
                lambda: comm.core.reduce("all_reduce", "float32", "sum", x.data_ptr(), out.data_ptr(), [2] * size)
            )
            torch.npu.synchronize()
        return call is None and comm.stats()["all_reduce_falls_back"] == 0


def blocking_exchange(rank: int, size: int, without: str) -> bool:
    """A call without a stream returns when the data are there."""
    with communicator(rank) as (comm, device):
        x = torch.full((size,), 1.0 + rank).to(device)
        ones, places = [1] * size, list(range(size))
        plan = _core.Plan(comm.core, "all_to_all_v", "float32", ones, places, ones, places)
        seen = seen_at_once(device, size, without, lambda out: plan.run(x.data_ptr(), out))
        return seen == [1.0 + j for j in range(size)]


def blocking_reduction(rank: int, size: int, without: str) -> bool:
    with communicator(rank) as (comm, device):
        x = torch.full((2 * size,), 1.0 + rank).to(device)

        def reduce(out: int) -> None:
            comm.core.reduce("all_reduce", "float32", "sum", x.data_ptr(), out, [2] * size)

        reduce(torch.zeros_like(x).data_ptr())  # the self-check
        return seen_at_once(device, 2 * size, without, reduce) == [sum(range(1, size + 1))] * (2 * size)


def seen_at_once(device: torch.device, n: int, without: str, call: Callable[[int], None]) -> list[float]:
    """What is in the output when the call returns."""
    out, seen = torch.zeros(n).to(device), torch.empty(n)
    torch.npu.synchronize()
    with emulated(task_delay_us=LATE), left_out(without):
        call(out.data_ptr())
        ctypes.memmove(seen.data_ptr(), out.data_ptr(), 4 * n)  # device memory is the host's here
        torch.npu.synchronize()
    values: list[float] = seen.tolist()
    return values


def gather_and_slice(rank: int, size: int, without: str) -> bool:
    """The peers' counts have arrived before they are used, and the memory of the detour goes when it has been read."""
    device = use_device(rank)
    with emulated(faults="HcclAlltoAllV=zeros"):
        comm = Communicator.from_env(backend="hccl", timeout=30.0)
    with comm:
        x, out = torch.full((size,), 1.0 + rank).to(device), torch.zeros(size).to(device)
        torch.npu.synchronize()
        with emulated(task_delay_us=LATE), left_out(without):
            caught_or(lambda: at.all_to_all_v(x, [1] * size, [1] * size, out=out, group=comm))
            seen = caught_or(lambda: out.cpu().tolist())
        return comm.stats()["falls_back"] == 1 and seen == [1.0 + j for j in range(size)]


def meeting(rank: int, size: int, without: str) -> bool:
    """Ranks of several hosts meet by what HcclAllGather has carried when it is done."""
    use_device(rank)
    table = write_table(Path(tempfile.mkdtemp()) / "table.json", [1] * size)
    param = AllToAllVParam(rank=rank, rank_size=size, rank_table_file=table, comm_domain="meeting")
    with emulated(task_delay_us=LATE), left_out(without):
        core = caught_or(lambda: connect(param, npu=True))
    if not isinstance(core, _core.Communicator):
        return False
    with Communicator(core) as comm:
        return comm.core.control is not None


def destroyed_behind_a_failure(rank: int, size: int, without: str) -> bool:
    """HCCL refuses to free a communicator in use, and is asked again: where calls have failed nothing is drained."""
    with communicator(rank) as (comm, device):
        x = torch.full((size,), 1.0 + rank).to(device)
        torch.npu.synchronize()
        with emulated(task_delay_us=3 * LATE):
            at.all_to_all_v(x, [1] * size, [1] * size, group=comm)
            comm.abort("no more")
            with left_out(without):
                left = caught_or(comm.destroy)
        torch.npu.synchronize()
        return left is None
