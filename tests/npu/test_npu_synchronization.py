"""Every synchronization of ours can be taken out; then a test fails that passes with it.

Tasks of the emulated streams come late, so that whoever does not wait sees what was there before.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from npu_ranks import caught, communicator, emulated

import alltoallv.torch as at
from alltoallv import _core
from alltoallv.errors import PeerMismatchError
from alltoallv.testing import Ranks

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
        late = torch.full((size * ELEMENTS,), 1.0 + rank).pin_memory()
        x = torch.zeros(size * ELEMENTS).to(device)
        torch.npu.synchronize()
        with emulated(task_delay_us=DELAY):
            for _ in range(3):
                x.copy_(late, non_blocking=True)
            y, work = at.all_to_all_v(x, [ELEMENTS] * size, [ELEMENTS] * size, group=comm, async_op=True)
            work.wait()
            torch.npu.synchronize()
        return bool((y.cpu().view(size, -1) == torch.arange(1.0, size + 1)[:, None]).all())


def memory_of_async(rank: int, size: int) -> bool:
    """The input is dropped at once; its memory must not serve somebody else before it has been read."""
    with communicator(rank) as (comm, device):
        right = True
        for _ in range(3):
            x = torch.full((size * ELEMENTS,), 1.0 + rank).to(device)
            torch.npu.synchronize()
            with emulated(task_delay_us=DELAY):
                call = at.calls.exchange(
                    at.group.resolve(comm), "all_to_all_v", out := torch.zeros_like(x), x,
                    ([ELEMENTS] * size, [j * ELEMENTS for j in range(size)]) * 2,
                )  # fmt: skip
                work = call.call.submit()
                del call, x
                emulated_other = torch.empty(size * ELEMENTS, device=device)
                emulated_other.copy_(torch.full((size * ELEMENTS,), -7.0).pin_memory(), non_blocking=True)
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
            import ctypes

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
    "device-wait": blocking_call,
    "agreement": agreement,
}


@pytest.mark.parametrize("name", SCENES)
def test_right_with_it_and_wrong_without(ranks: Ranks, name: str) -> None:
    scene = SCENES[name]
    assert all(ranks(2, communicator=False, fresh=True)(scene))
    env = {"ALLTOALLV_TEST_WITHOUT": name, "HCCL_EXEC_TIMEOUT": "5"}
    without = ranks(2, communicator=False, fresh=True, outcomes=True, env=env)(scene)
    assert not all(outcome.error is None and outcome.result for outcome in without)
