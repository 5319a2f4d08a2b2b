"""Mistakes, late and lost ranks on backend alltoallv: an error on every rank, of torch's type where torch has one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from backend_groups import Grouped, carrier, joined, on_group
from started import wait_for_ranks
from trouble import last_seq, wait_until_in

import alltoallv.torch as at
from alltoallv.errors import AllToAllVError, CommTimeoutError, PeerLostError, PeerMismatchError
from alltoallv.testing import Ranks

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


@on_group(3)
def test_ranks_that_disagree(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """Every rank gets the error, sync or async, and the group stays usable; tests/matrix has the other collectives."""
    last = rank == size - 1
    mistakes: list[Callable[[bool], dist.Work | None]] = [
        lambda a: dist.all_reduce(torch.ones(4 if last else 3), async_op=a),
        lambda a: dist.barrier(async_op=a) if last else dist.all_reduce(torch.ones(3), async_op=a),
        lambda a: dist.all_gather(list(torch.ones(size, 2 + last)), torch.ones(2 + last), async_op=a),
    ]
    for number, mistake in enumerate(mistakes):
        for async_op in (False, True):
            with pytest.raises(PeerMismatchError, match=rf"rank ({size - 1}|0)"):  # noqa: PT012
                work = mistake(async_op)
                assert work is not None, number
                work.wait()
            if async_op:
                assert isinstance(work.exception(), PeerMismatchError)
                assert work.is_completed()
                assert not work.is_success()
    work = dist.all_reduce(torch.ones(4 if last else 3), async_op=True)
    with pytest.raises(RuntimeError, match=r"PeerMismatchError: operator .* rank 2 has elements: 4"):
        work.get_future().wait()
    dist.all_reduce(x := torch.ones(3))
    assert x.tolist() == [size] * 3


@on_group(2)
def test_mistakes_in_several_tensors(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """A coalesced call of three tensors takes three operators on every rank, sync or async, on whichever rank."""

    def several(kind: torch.dtype, async_op: bool) -> None:
        work = dist.all_reduce_coalesced([torch.ones(n, dtype=kind) for n in (3, 4, 5)], AVG, async_op=async_op)
        if async_op:
            work.wait()

    def gathers(lengths: list[int], async_op: bool) -> None:
        with dist.distributed_c10d._coalescing_manager(group, async_ops=async_op) as manager:
            for n in lengths:
                dist.all_gather_into_tensor(torch.empty(n * size), torch.ones(n))
        if async_op:
            manager.wait()

    for how in ((False, False), (True, True), (False, True), (True, False)):
        with pytest.raises(RuntimeError, match=r"on rank 1: .*op 'avg' is not defined for dtype int32"):
            several(torch.int32 if rank else torch.float32, how[rank])
        with pytest.raises(RuntimeError, match=r"rank 1.*A2A-3010"):
            gathers([1, 3, 3] if rank else [2, 3, 3], how[rank])
        dist.all_reduce(x := torch.ones(3))
        assert x.tolist() == [2] * 3
    sparse = [torch.eye(2).to_sparse() if rank else torch.eye(2) for _ in range(3)]
    with pytest.raises(PeerMismatchError, match=r"rank 1 calls handed_to_gloo.*A2A-3009"):
        dist.all_reduce_coalesced(sparse)
    dist.barrier()


@on_group(2)
def test_a_rank_that_needs_gloo_alone(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """It makes gloo together with the others, who are told; a rank that does nothing is waited for."""
    sub, cpu = dist.new_group(), torch.device("cpu")
    sparse = torch.eye(2).to_sparse()
    started = time.monotonic()
    with pytest.raises(PeerMismatchError, match=r"rank 0 calls all_reduce, rank 1 calls handed_to_gloo.*A2A-3009"):
        dist.send(sparse, 0, group=sub) if rank == 1 else dist.all_reduce(torch.ones(2), group=sub)
    assert time.monotonic() - started < 20  # milliseconds on an idle machine, and not the timeout
    dist.all_reduce(sparse, group=sub)
    assert sub._get_backend(cpu).name() == "gloo"
    assert sparse.to_dense().diagonal().tolist() == [size] * 2


@on_group(2, timeout=20)
def test_late_rank(rank: int, size: int, group: dist.ProcessGroup, file: str) -> None:
    """The group's timeout, one set later, and one of a call."""
    slow = dist.new_group(timeout=timedelta(seconds=2))  # also for joining
    again = dist.new_group(timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(3), group=again)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), again)
    for sub in (slow, again):
        over = Path(f"{file}-{sub.group_name}-over")
        if rank == 0:
            started = time.monotonic()
            with pytest.raises(CommTimeoutError, match="rank 1"):
                dist.all_reduce(torch.ones(3), group=sub)
            assert 0.8 < time.monotonic() - started < 15
            over.touch()
        while not over.exists():  # a call of another group would be a deadlock, and told as one
            time.sleep(0.01)
        dist.barrier(group)
        with pytest.raises(AllToAllVError, match="rank"):  # ended for good
            dist.all_reduce(torch.ones(3), group=sub)
    if rank == 0:
        options = torch._C._distributed_c10d.BarrierOptions()
        options.timeout = timedelta(seconds=1)
        with pytest.raises(CommTimeoutError, match="rank 1"):
            group.barrier(options).wait()
        Path(f"{file}-over").touch()
    else:
        while not Path(f"{file}-over").exists():
            time.sleep(0.01)
        with pytest.raises(AllToAllVError, match="rank 0"):
            dist.barrier()


@on_group(3)
def test_monitored_barrier(rank: int, size: int, group: dist.ProcessGroup, file: str) -> None:
    """The function of torch, whose errors begin as gloo's."""
    every, first, at_once = dist.new_group(), dist.new_group(), dist.new_group()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.monitored_barrier(dist.new_group([0, 1]), 20.0)
    over = Path(f"{file}-over")
    if rank == 0:
        with pytest.raises(CommTimeoutError, match=r"^Ranks 1, 2 failed to pass monitoredBarrier: rank 0 waited \d"):
            dist.monitored_barrier(every, timedelta(seconds=0.3), wait_all_ranks=True)
        with pytest.raises(CommTimeoutError, match=r"^Rank 1 failed to pass monitoredBarrier: rank 0 waited \d"):
            dist.monitored_barrier(first, timedelta(seconds=0.3))
        with pytest.raises(CommTimeoutError, match=r"^Rank 0 timed out in monitoredBarrier: rank 0 waited"):
            dist.monitored_barrier(at_once, timedelta(0))
        over.touch()
    while not over.exists():  # a call of another group would be a deadlock, and told as one
        time.sleep(0.01)
    if rank == 2:
        with pytest.raises(CommTimeoutError, match=r"^Rank 2 successfully reached monitoredBarrier, but received"):
            dist.monitored_barrier(every)


def test_a_rank_that_dies_before_it_joins_a_group(ranks: Ranks, tmp_path: Path) -> None:
    """The others, which know its process from the default group, do not wait for the timeout."""

    def work(rank: int, size: int, file: str) -> None:
        with joined(rank, size, file):
            dist.barrier()
            wait_for_ranks(f"{file}-met", rank, 0, 1, 2)
            if rank == 2:
                time.sleep(0.3)  # the others wait by then
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.monotonic()
            with pytest.raises(PeerLostError, match=r"rank 2 \(pid .*\) was lost before it joined"):
                dist.new_group([0, 1, 2])
            assert time.monotonic() - begin < 20
            wait_for_ranks(file, rank, 0, 1)  # not another one that has ended by now

    outcomes = ranks(3, communicator=False, fresh=True, outcomes=True)(work, str(tmp_path / "file"))
    assert [outcome.error is None for outcome in outcomes] == [True, True, False], outcomes


def test_killed_rank(ranks: Ranks, tmp_path: Path) -> None:
    """While the others wait in a call, for a handle, and in DDP's backward pass; then a new group of the rest."""

    def run(rank: int, size: int, directory: str) -> None:
        torch.set_num_threads(1)
        store = dist.FileStore(f"{directory}/all", size)
        dist.init_process_group("alltoallv", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        group, second, third = dist.group.WORLD, dist.new_group(), dist.new_group()
        assert group is not None
        model = torch.nn.Linear(30, 30)
        parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=third)
        for _ in range(3):  # past the rebuilding of buckets, which communicates in the forward pass
            parallel(torch.ones(2, 30)).sum().backward()
        wait_for_ranks(f"{directory}/trained", rank, 0, 1, 2)
        if rank == 1:
            world = carrier(group)
            wait_until_in(world, last_seq(world) + 1)
            os.kill(os.getpid(), signal.SIGKILL)
        handle = dist.all_reduce(torch.ones(5), group=second, async_op=True)
        started = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 1"):
            dist.all_reduce(torch.ones(5))
        with pytest.raises(PeerLostError, match="rank 1"):
            handle.wait()
        with pytest.raises(RuntimeError, match=r"(?s)PeerLostError.*rank 1"):
            parallel(torch.ones(2, 30)).sum().backward()
        assert time.monotonic() - started < 30
        dist.destroy_process_group()
        if rank == 0 or rank == 2:
            with joined(rank // 2, size - 1, f"{directory}/rest"):
                dist.all_reduce(x := torch.ones(3))
                assert x.tolist() == [2, 2, 2]

    outcomes = ranks(3, communicator=False, fresh=True, outcomes=True)(run, str(tmp_path))
    assert [outcome.error is None for outcome in outcomes] == [True, False, True], outcomes


@on_group(2)
def test_rank_that_leaves(rank: int, size: int, group: dist.ProcessGroup) -> None:
    sub = dist.new_group()
    core = carrier(sub)
    dist.all_reduce(torch.ones(100_000), group=sub)
    if rank == 0:
        dist.destroy_process_group(sub)
        assert not core.usable
    else:
        with pytest.raises(PeerLostError, match="rank 0"):
            dist.all_reduce(torch.ones(3), group=sub)
    dist.barrier(group)
    extra = dist.new_group()
    dist.barrier(group)
    if rank == 1:
        extra.abort()
    with pytest.raises(PeerLostError, match="aborted"):
        dist.all_reduce(torch.ones(3), group=extra)


@on_group(2)
def test_outputs_of_several_after_a_mismatch(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """The last of the tensors differs: none of the others has been written."""

    def check(n: int, async_op: bool) -> None:
        sums, parts, wholes = torch.full((n, 2), -5.0)[:, 1], torch.full((n,), -5.0), torch.full((2 * n,), -5.0)
        lists, odd, ones = list(torch.full((2, n), -5.0)), torch.ones(n + 2 * rank), torch.ones(n)
        kinds = "AllreduceOptions", "ReduceScatterOptions", "AllgatherOptions"
        reduces, scatters, gathers = (getattr(torch._C._distributed_c10d, kind)() for kind in kinds)
        reduces.asyncOp = scatters.asyncOp = gathers.asyncOp = async_op
        pairs = [torch.ones(2 * n), odd], [ones, odd]
        calls: list[Callable[[], dist.Work]] = [
            lambda: group.allreduce_coalesced([sums, odd.clone()], reduces),
            lambda: group.reduce_scatter_tensor_coalesced([parts, odd[::2].clone()], pairs[0], scatters),
            lambda: group.allgather_into_tensor_coalesced([wholes, odd.repeat(2)], pairs[1], gathers),
            lambda: group.allgather_coalesced([lists, [odd.clone(), odd.clone()]], pairs[1], gathers),
        ]
        for call in calls:
            with pytest.raises(AllToAllVError):
                call().wait()
            dist.all_reduce(x := torch.ones(3))
            assert x.tolist() == [2] * 3
        for output in (sums, parts, wholes, *lists):
            assert (output == -5).all()
        work = group.allreduce_coalesced([sums, ones], reduces)
        assert work.get_future().wait() == work.result() == [sums, ones] if async_op else work.wait()
        assert (sums == -10).all()
        assert (ones == 2).all()

    for n in (4, 60_000):
        for async_op in (False, True):
            check(n, async_op)


@on_group(3, seconds=20)
def test_what_a_rank_may_do_alone(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """Nothing of it waits for the others: its group has no engine of torch's yet."""
    sub, cpu, c10d = dist.new_group(), torch.device("cpu"), dist.distributed_c10d
    if rank == 0:
        backend = sub._get_backend(cpu)
        assert isinstance(backend.supports_coalescing, bool)  # batch_isend_irecv of newer versions asks that
        c10d._set_pg_timeout(timedelta(seconds=9), sub)
        assert sub._get_backend(cpu).options._timeout == sub.timeout == timedelta(seconds=9)
    if rank < 2:
        out = torch.empty(2)
        messages = [(dist.isend, torch.full((2,), rank + 1.0)), (dist.irecv, out)]
        for work in dist.batch_isend_irecv([dist.P2POp(*each, 1 - rank, group=sub) for each in messages]):
            work.wait()
        with c10d._coalescing_manager(sub, cpu, async_ops=True) as manager:
            for call, tensor in messages:
                call(tensor, 1 - rank, group=sub)
        manager.wait()
        assert out.tolist() == [2.0 - rank] * 2
    dist.all_reduce(x := torch.ones(2), group=sub)
    assert x.tolist() == [size] * 2


@on_group(2)
def test_functions_of_alltoallv_follow_a_changed_limit(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """Down and up again, by both ways to change it; also messages."""
    sub = dist.new_group()
    for seconds in (0.3, 30.0):
        sub.set_timeout(timedelta(seconds=seconds))
    some = [dist.new_group() for _ in range(3)]
    calls: list[Callable[[dist.ProcessGroup], object]] = [
        lambda own: at.all_to_all_v(torch.ones(2), [1, 1], [1, 1], group=own),
        lambda own: at.all_reduce(torch.ones(2), group=own),
        lambda own: at.send(torch.ones(2), 1, group=own),
    ]
    if rank == 0:
        for call, own in zip(calls, some, strict=True):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), own)
            started = time.monotonic()
            with pytest.raises(CommTimeoutError):
                call(own)
            assert time.monotonic() - started < 15  # of the 60 s that the groups had
        time.sleep(0.4)  # longer than the limit that was changed again
    at.all_reduce(x := torch.ones(2), group=sub)
    assert x.tolist() == [2, 2]
    dist.barrier()


@pytest.mark.parametrize("backend", ["gloo", "alltoallv"])
@pytest.mark.parametrize("default", [True, False])
def test_functions_of_alltoallv_follow_the_limit_of_any_group(grouped: Grouped, backend: str, default: bool) -> None:
    """Of the default group and of others, after calls: down, and up again. One that was given stays."""

    def check(rank: int, size: int, group: dist.ProcessGroup) -> None:
        own, given = group if default else dist.new_group(timeout=timedelta(seconds=50)), dist.new_group(backend="gloo")
        at.all_reduce(torch.ones(2), group=own)
        limits = dist.distributed_c10d._set_pg_timeout
        limits(timedelta(seconds=0.2), own)
        limits(timedelta(seconds=40), own)
        if rank == 1:
            time.sleep(0.4)  # longer than the limit that was changed again
        at.all_reduce(x := torch.ones(2), group=own)
        assert x.tolist() == [2, 2]
        limits(timedelta(seconds=0.2), own)
        if rank == 0:
            started = time.monotonic()
            with pytest.raises(CommTimeoutError):
                at.all_to_all_v(torch.ones(2), [1, 1], [1, 1], group=own)
            assert time.monotonic() - started < 15
        at.from_group(given, timeout=30)
        limits(timedelta(seconds=0.2), given)
        if rank == 1:
            time.sleep(0.4)
        at.all_reduce(torch.ones(2), group=given)

    grouped(2, backend=backend)(check)


def test_a_group_of_ranks_with_and_without_a_default_group(ranks: Ranks, tmp_path: Path) -> None:
    """As weight updates make it: each side has a default group of its own, or none. Made twice, with destruction."""

    def check(rank: int, size: int, folder: str, worlds: list[list[int]]) -> None:
        c10d, limit = dist.distributed_c10d, timedelta(seconds=20)
        own = next((world for world in worlds if rank in world), None)
        if own is not None:
            store = dist.FileStore(f"{folder}/world-{own[0]}", len(own))
            about = {"store": store, "rank": own.index(rank), "world_size": len(own), "timeout": limit}
            dist.init_process_group("alltoallv", **about)
        for turn in range(2):
            store = dist.FileStore(f"{folder}/weights-{turn}", size)
            group, _ = c10d._new_process_group_helper(
                size, rank, [], "alltoallv", store, group_name=f"weights-{turn}", timeout=limit
            )
            c10d._world.pg_group_ranks[group] = {j: j for j in range(size)}
            x = torch.full((1000,), float(rank))
            dist.broadcast(x, 0, group=group)
            assert (x == 0).all()
            dist.all_reduce(y := torch.ones(4), group=group)
            assert y.tolist() == [size] * 4
            if own is not None:
                dist.all_reduce(z := torch.ones(2))
                assert z.tolist() == [len(own)] * 2
            dist.destroy_process_group(group)
        if own is not None:
            dist.destroy_process_group()

    for number, worlds in enumerate(([[1, 2]], [[0], [1, 2]], [[0]], [])):
        folder = tmp_path / str(number)
        folder.mkdir()
        ranks(3, communicator=False)(check, str(folder), worlds)
