"""Every synchronization of ours can be taken out; then a test fails that passes with it.

Tasks of the emulated streams come late, so that whoever does not wait sees what was there before. What is taken out is
back when a scene ends, and a communicator is made before: the ranks also run other tests.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import npu_waits
import pytest
import torch
import torch.distributed as dist
from npu_ranks import caught, caught_or, communicator, emulated, group
from npu_starts import run_program
from npu_waits import left_out

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import PeerMismatchError
from alltoallv.testing import Ranks
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups

DELAY = 30  # milliseconds; more where the result must be wrong, so that a busy machine does not make it right
ELEMENTS = 5000

ROOT = Path(__file__).parents[2]

Scene = Callable[[int, int, str], bool]  # without one synchronization; whether the result was right


def late_tasks(without: str) -> AbstractContextManager[None]:
    """All of them."""
    return emulated(task_delay_us=1000 * (6 * DELAY if without else DELAY))


def late_exchange(without: str) -> AbstractContextManager[None]:
    """It alone."""
    return emulated(faults=f"HcclAlltoAllV=delay:{10 * DELAY if without else DELAY}")


def output_of_async(rank: int, size: int, without: str) -> bool:
    """What is enqueued behind ``work.wait()`` sees the output."""
    with communicator(rank) as (comm, device):
        x = torch.full((size * ELEMENTS,), 1.0 + rank).to(device)
        out = torch.zeros(size * ELEMENTS).to(device)
        torch.npu.synchronize()
        with late_exchange(without), left_out(without):
            _, work = at.all_to_all_v(x, [ELEMENTS] * size, [ELEMENTS] * size, out=out, group=comm, async_op=True)
            work.wait()
            seen = out.cpu()
            torch.npu.synchronize()
        return bool((seen.view(size, -1) == torch.arange(1.0, size + 1)[:, None]).all())


def input_of_async(rank: int, size: int, without: str) -> bool:
    """The exchange sees what was enqueued before it."""
    with communicator(rank) as (comm, device):
        late = torch.full((size * ELEMENTS,), 1.0 + rank).to(device)
        x = torch.zeros(size * ELEMENTS).to(device)
        torch.npu.synchronize()
        with late_tasks(without), left_out(without):
            for _ in range(5):
                torch.empty_like(late).copy_(late)  # keeps the stream busy
            x.copy_(late)
            y, work = at.all_to_all_v(x, [ELEMENTS] * size, [ELEMENTS] * size, group=comm, async_op=True)
            work.wait()
            torch.npu.synchronize()
        return bool((y.cpu().view(size, -1) == torch.arange(1.0, size + 1)[:, None]).all())


def launches_behind_the_queue(rank: int, size: int, without: str) -> bool:
    """torch_npu hands its launches to the stream on a thread of its own: ours come behind them."""
    with communicator(rank) as (comm, device):
        source = torch.arange(20 * ELEMENTS, dtype=torch.float32).view(20, ELEMENTS).to(device)
        x, out = torch.zeros(ELEMENTS).to(device), torch.zeros(ELEMENTS).to(device)
        share = [ELEMENTS // size] * size
        with left_out(without):
            at.all_to_all_v(x, share, share, out=out, group=comm)  # the first call reads the stream's handle
            torch.npu.synchronize()
            with emulated(faults="aclrtMemcpyAsync*=delay:20"):
                for row in source:
                    x.copy_(row)  # keeps torch_npu's thread busy
                at.all_to_all_v(x, share, share, out=out, group=comm)
        torch.npu.synchronize()
        first = out.cpu().view(size, -1)[:, 0]  # of every rank: the last to come has not waited for the others
        return bool((first == 19.0 * ELEMENTS + rank * (ELEMENTS // size)).all())


def memory_of_async(rank: int, size: int, without: str) -> bool:
    """The input is dropped at once; its memory must not serve somebody else before it has been read."""
    with communicator(rank) as (comm, device):
        other = torch.full((size * ELEMENTS,), -7.0).to(device)
        layout = ([ELEMENTS] * size, [j * ELEMENTS for j in range(size)]) * 2
        member = groups.resolve(comm)
        right = True
        for _ in range(3):
            x = torch.full((size * ELEMENTS,), 1.0 + rank).to(device)
            out = torch.zeros(size * ELEMENTS).to(device)
            torch.npu.synchronize()
            with late_exchange(without), left_out(without):
                call = calls.exchange(member, "all_to_all_v", out, x, layout)
                work = call.call.submit()  # less the handle, which keeps the tensors too
                del call, x
                torch.empty(size * ELEMENTS, device=device).copy_(other)
                work.wait()
                torch.npu.synchronize()
            right &= bool((out.cpu().view(size, -1) == torch.arange(1.0, size + 1)[:, None]).all())
        return right


def agreement(rank: int, size: int, without: str) -> bool:
    """Counts that disagree are found before anything is launched."""
    with communicator(rank) as (comm, device):
        x = torch.zeros(2 * size).to(device)
        recvs = [2] * size if rank else [1] * size
        with left_out(without):
            error = caught(lambda: at.all_to_all_v(x, [2] * size, recvs, group=comm).cpu())
        return isinstance(error, PeerMismatchError)


def counts_of_async(rank: int, size: int, without: str) -> bool:
    """HCCL may read the counts when the device comes to the call, long after it has returned."""
    with communicator(rank) as (comm, device):
        x = torch.full((size,), 1.0 + rank).to(device)
        out = torch.zeros(size).to(device)
        torch.npu.synchronize()
        with late_tasks(without), emulated(late_counts=1), left_out(without):
            at.all_to_all_v(x, [1] * size, [1] * size, out=out, group=comm)
            return caught_or(lambda: out.cpu().tolist()) == [1.0 + j for j in range(size)]


def sync_behind_async(rank: int, size: int, without: str) -> bool:
    """Calls of one communicator run in their order, whichever streams they are on."""
    with communicator(rank) as (comm, device):
        x = torch.full((size,), 1.0 + rank).to(device)
        torch.npu.synchronize()
        with left_out(without):
            with emulated(faults="HcclAlltoAllV=delay:500" if rank == 0 else ""):
                first, work = at.all_to_all_v(x, [1] * size, [1] * size, group=comm, async_op=True)
            second = at.all_to_all_v(-x, [1] * size, [1] * size, group=comm)
            work.wait()
            seen = caught_or(lambda: (first.cpu().tolist(), second.cpu().tolist()))
        ranks = [1.0 + j for j in range(size)]
        return seen == (ranks, [-j for j in ranks])


def learnt_output_of_another_stream(rank: int, size: int, without: str) -> bool:
    """A learnt output that its stream still reads does not become that of a call from another stream."""
    with communicator(rank) as (comm, device), Communicator.from_env("second", backend="hccl") as second:
        late = torch.zeros(ELEMENTS).to(device)
        read = torch.zeros(size * ELEMENTS).to(device)
        counts = [ELEMENTS] * size
        inputs = [torch.full((size * ELEMENTS,), sign * (1.0 + rank)).to(device) for sign in (1, -1)]
        for group in (comm, second):
            at.all_to_all_v(inputs[0], counts, counts, group=group)
        one, other = torch.npu.Stream(), torch.npu.Stream()
        torch.npu.synchronize()
        with left_out(without):
            with torch.npu.stream(one):
                learnt = at.all_to_all_v(inputs[0], counts, group=comm, async_op=True)[1].result()
                torch.npu.synchronize()
            with late_tasks(without):
                with torch.npu.stream(one):
                    for _ in range(8):
                        torch.empty_like(late).copy_(late)  # keeps the stream busy
                    at.all_to_all_v(learnt, counts, counts, out=read, group=second)
                    del learnt
                with torch.npu.stream(other):
                    at.all_to_all_v(inputs[1], counts, group=comm, async_op=True)[1].wait()
                torch.npu.synchronize()
        sent = 1.0 + rank  # part r of everybody's output is what rank r has sent it
        return bool((read.cpu().view(size, -1) == sent).all())


def first_behind_the_owners(rank: int, size: int, without: str) -> bool:
    """torch_npu's communicator may be busy when our first call makes its self-check on a stream of its own."""
    return first_behind_the_owners_call(rank, size, without, "HcclAllReduce=delay:1000", 0)


def first_behind_the_owners_queue(rank: int, size: int, without: str) -> bool:
    """torch_npu may not yet have handed its own collective to HCCL when our first call makes its self-check."""
    return first_behind_the_owners_call(rank, size, without if rank == 0 else "", "aclrtMemcpyAsync*=delay:20", 50)


def first_behind_the_owners_call(rank: int, size: int, without: str, faults: str, copies: int) -> bool:
    file = Path(tempfile.gettempdir()) / f"alltoallv-{os.environ['ALLTOALLV_JOB_ID']}"
    with group(rank, size, str(file)) as (_, device):
        x = torch.full((size,), 1.0 + rank).to(device)
        total, other = x.clone(), torch.zeros(ELEMENTS).to(device)
        dist.all_reduce(x.clone())  # makes it
        torch.npu.synchronize()
        with emulated(faults=faults), left_out(without):
            for _ in range(copies):
                torch.empty_like(other).copy_(other)  # keeps torch_npu's thread busy
            work = dist.all_reduce(total, async_op=True)
            y = at.all_to_all_v(x, [1] * size, [1] * size)
            work.wait()
            return bool(y.cpu().sum() == total.cpu()[0])


def destroyed_while_data_move(rank: int, size: int, without: str) -> bool:
    """HCCL refuses to free a communicator in use for longer than it is asked again."""
    with communicator(rank) as (comm, device):
        x = torch.full((size,), 1.0 + rank).to(device)
        torch.npu.synchronize()
        with emulated(task_delay_us=3_000_000):
            y = at.all_to_all_v(x, [1] * size, [1] * size, group=comm)
        with left_out(without):
            left = caught_or(comm.destroy)
        return left is None and y.cpu().tolist() == [1.0 + j for j in range(size)]


SCENES: dict[str, Scene] = {
    "output-event": output_of_async,
    "input-event": input_of_async,
    "record-stream": memory_of_async,
    "learnt-memory": learnt_output_of_another_stream,
    "task-queue": launches_behind_the_queue,
    "owner-queue": first_behind_the_owners_queue,
    "owner-wait": first_behind_the_owners,
    "launch-order": sync_behind_async,
    "kept-counts": counts_of_async,
    "agreement": agreement,
    "exchange-wait": npu_waits.blocking_exchange,
    "reduction-wait": npu_waits.blocking_reduction,
    "check-wait": npu_waits.self_check,
    "verdict-wait": npu_waits.self_check,
    "reduction-check-wait": npu_waits.self_check_of_a_reduction,
    "fallback-counts": npu_waits.gather_and_slice,
    "fallback-memory": npu_waits.gather_and_slice,
    "meeting-wait": npu_waits.meeting,
    "drain": destroyed_while_data_move,
    "destroy-again": npu_waits.destroyed_behind_a_failure,
}
# torch_npu uses no device whose stream has failed.
BREAKS_THE_DEVICE = ("kept-counts", "agreement", "launch-order", "owner-wait", "owner-queue", "check-wait")
BREAKS_THE_DEVICE += ("fallback-counts", "fallback-memory", "meeting-wait", "destroy-again")


def test_every_switch_has_a_scene() -> None:
    found = set()
    for folder, suffix in (("op_host/runtime/hccl", "*.cpp"), ("python/alltoallv/torch/engines", "*.py")):
        for file in (ROOT / folder).glob(suffix):
            found |= set(re.findall(r'\b(?:synchronizes|wait|on_device|gather_to_host)\("([a-z-]+)"', file.read_text()))
    assert found == {*SCENES, "end-first"}


@pytest.mark.parametrize("without", ["", pytest.param("end-first", marks=pytest.mark.slow)])
def test_communicators_end_before_torch_npu(without: str) -> None:
    """HCCL refuses what comes after ACL's end."""
    result = run_program(str(ROOT / "tests/npu/programs/leaves_at_exit.py"), ALLTOALLV_TEST_WITHOUT=without)
    assert result.stdout.count("it has [0.0, 1.0]") == 2, result.stderr
    assert ("HcclCommDestroy" in result.stderr) == bool(without), result.stderr


def test_right_with_them(ranks: Ranks) -> None:
    for scene in dict.fromkeys(SCENES.values()):
        assert all(ranks(2, communicator=False)(scene, ""))


@pytest.mark.parametrize("name", SCENES)
def test_wrong_without(ranks: Ranks, name: str, tmp_path: Path) -> None:
    fresh = name in BREAKS_THE_DEVICE
    env = {"HCCL_EXEC_TIMEOUT": "3", "TMPDIR": str(tmp_path)} if fresh else {}  # their FileStore stays behind
    found = ranks(2, communicator=False, fresh=fresh, outcomes=True, env=env)(SCENES[name], name)
    assert not all(outcome.error is None and outcome.result for outcome in found)
    if not fresh:  # and it is not the communicator that failed
        assert all(outcome.error is None for outcome in found), found
