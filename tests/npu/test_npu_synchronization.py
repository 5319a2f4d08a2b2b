"""Every synchronization of ours can be taken out; then a test fails that passes with it.

Tasks of the emulated streams come late, so that whoever does not wait sees what was there before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from npu_ranks import caught, communicator, emulated

import alltoallv.torch as at
from alltoallv import _core
from alltoallv.errors import PeerMismatchError
from alltoallv.testing import Ranks
from alltoallv.torch import calls
from alltoallv.torch import group as groups

DELAY = 30_000  # microseconds
ELEMENTS = 5000

Scene = Callable[[int, int], bool]  # whether the result was right


def output_of_async(rank: int, size: int) -> bool:
    """What is enqueued behind ``work.wait()`` sees the output."""
    with communicator(rank) as (comm, device):
        x = torch.full((size * ELEMENTS,), 1.0 + rank).to(device)
        out = torch.zeros(size * ELEMENTS).to(device)
        torch.npu.synchronize()
        with emulated(task_delay_us=DELAY):
            _, work = at.all_to_all_v(x, [ELEMENTS] * size, [ELEMENTS] * size, out=out, group=comm, async_op=True)
            work.wait()
            seen = out.cpu()
            torch.npu.synchronize()
        return bool((seen.view(size, -1) == torch.arange(1.0, size + 1)[:, None]).all())


def input_of_async(rank: int, size: int) -> bool:
    """The exchange sees what was enqueued before it."""
    with communicator(rank) as (comm, device):
        late = torch.full((size * ELEMENTS,), 1.0 + rank).to(device)
        x = torch.zeros(size * ELEMENTS).to(device)
        torch.npu.synchronize()
        with emulated(task_delay_us=DELAY):
            for _ in range(5):
                torch.empty_like(late).copy_(late)  # keeps the stream busy
            x.copy_(late)
            y, work = at.all_to_all_v(x, [ELEMENTS] * size, [ELEMENTS] * size, group=comm, async_op=True)
            work.wait()
            torch.npu.synchronize()
        return bool((y.cpu().view(size, -1) == torch.arange(1.0, size + 1)[:, None]).all())


def launches_behind_the_queue(rank: int, size: int) -> bool:
    """torch_npu hands its launches to the stream on a thread of its own: ours come behind them."""
    with communicator(rank) as (comm, device):
        source = torch.arange(200 * ELEMENTS, dtype=torch.float32).view(200, ELEMENTS).to(device)
        x = torch.zeros(ELEMENTS).to(device)
        right = True
        for _ in range(30):
            out = torch.zeros(ELEMENTS).to(device)
            torch.npu.synchronize()
            for row in source:
                x.copy_(row)
            share = [ELEMENTS // size] * size
            at.all_to_all_v(x, share, share, out=out, group=comm)
            torch.npu.synchronize()
            right &= float(out.cpu()[0]) == 199.0 * ELEMENTS + rank * (ELEMENTS // size)
        return right


def memory_of_async(rank: int, size: int) -> bool:
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
            with emulated(task_delay_us=DELAY):
                call = calls.exchange(member, "all_to_all_v", out, x, layout)
                work = call.call.submit()  # less the handle, which keeps the tensors too
                del call, x
                torch.empty(size * ELEMENTS, device=device).copy_(other)
                work.wait()
                torch.npu.synchronize()
            right &= bool((out.cpu().view(size, -1) == torch.arange(1.0, size + 1)[:, None]).all())
        return right


def blocking_call(rank: int, size: int) -> bool:
    """A call without a stream returns when the data are there."""
    with communicator(rank) as (comm, device):
        x = torch.full((size,), 1.0 + rank).to(device)
        out = torch.zeros(size).to(device)
        torch.npu.synchronize()
        ones, places = [1] * size, list(range(size))
        plan = _core.Plan(comm.core, "all_to_all_v", "float32", ones, places, ones, places)
        with emulated(task_delay_us=DELAY):
            plan.run(x.data_ptr(), out.data_ptr())
            seen = torch.empty(size)
            ctypes.memmove(seen.data_ptr(), out.data_ptr(), 4 * size)  # device memory is the host's here
            torch.npu.synchronize()
        return seen.tolist() == [1.0 + j for j in range(size)]


def agreement(rank: int, size: int) -> bool:
    """Counts that disagree are found before anything is launched."""
    with communicator(rank) as (comm, device):
        x = torch.zeros(4 * size).to(device)
        recvs = [2] * size if rank else [1] * size
        error = caught(lambda: at.all_to_all_v(x, [2] * size, recvs, group=comm).cpu())
        return isinstance(error, PeerMismatchError)


SCENES = {
    "output-event": output_of_async,
    "input-event": input_of_async,
    "record-stream": memory_of_async,
    "task-queue": launches_behind_the_queue,
    "device-wait": blocking_call,
    "agreement": agreement,
}


def test_right_with_them(ranks: Ranks) -> None:
    for scene in SCENES.values():
        assert all(ranks(2, communicator=False)(scene))


@pytest.mark.parametrize("name", SCENES)
def test_wrong_without(ranks: Ranks, name: str) -> None:
    env = {"ALLTOALLV_TEST_WITHOUT": name, "HCCL_EXEC_TIMEOUT": "5"}
    found = ranks(2, communicator=False, fresh=True, outcomes=True, env=env)(SCENES[name])
    assert not all(outcome.error is None and outcome.result for outcome in found)
