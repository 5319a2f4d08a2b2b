"""Calls keep Python's lock while they are brief only: whoever waits long for a peer lets the other threads run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trouble import wait_for

from alltoallv import Communicator, empty
from alltoallv.errors import PeerMismatchError
from alltoallv.numpy import Plan, all_reduce, all_to_all_v, barrier, quantized_all_reduce

Call = Callable[[], Any]


def repeating_call(comm: Communicator, kind: str) -> Call:
    """One that keeps the lock, from its second time on at the latest."""
    x = np.full(comm.size, comm.rank, np.float32)
    y = empty(comm.size, np.float32)
    ones = [1] * comm.size
    if kind == "plan":
        plan = Plan(ones, ones, group=comm)
        return lambda: plan(x, y)
    if kind == "function":
        return lambda: all_to_all_v(x, ones, ones, out=y, group=comm)
    return lambda: (all_reduce if kind == "all_reduce" else quantized_all_reduce)(x, group=comm)


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
@pytest.mark.parametrize("kind", ["plan", "function", "all_reduce", "quantized_all_reduce"])
def test_who_waits_for_long_lets_the_other_threads_run(ranks, kind: str, threads: bool, tmp_path: Path) -> None:
    """The last rank comes once a thread of the first, which waits for it, has said so: else never."""
    said = tmp_path / "said"

    def work(comm: Communicator) -> list[float]:
        call = repeating_call(comm, kind)
        for _ in range(3):
            result = call()
        barrier(group=comm)
        if comm.rank == 0:

            def say() -> None:
                time.sleep(0.3)  # the call has begun by now
                said.touch()

            threading.Thread(target=say).start()
        elif comm.rank == comm.size - 1:
            wait_for(said.exists, "a thread of rank 0 that runs while its call waits")
        result = call()
        return [float(each) for each in result]

    size = 3
    sums = kind.endswith("all_reduce")
    expected = [3.0] * size if sums else [0.0, 1.0, 2.0]
    for result in ranks(size, threads=threads)(work):
        np.testing.assert_allclose(result, expected, rtol=0.02 if kind.startswith("quantized") else 0)


def test_a_call_behind_an_asynchronous_one_lets_other_threads_run(ranks, tmp_path: Path) -> None:
    said = tmp_path / "said"

    def work(comm: Communicator) -> list[float]:
        call = repeating_call(comm, "plan")
        call()
        if comm.rank == 1:
            wait_for(said.exists, "a thread of rank 0 that runs while its call waits for its turn")
        pending = all_to_all_v(np.zeros(2, np.int8), [1, 1], group=comm, async_op=True)[1]
        if comm.rank == 0:
            threading.Timer(0.3, said.touch).start()
        result = call()
        pending.wait()
        return [float(each) for each in result]

    assert ranks(2)(work) == [[0.0, 1.0]] * 2


def test_an_error_of_a_brief_call_leaves_the_lock_in_order(ranks) -> None:
    def work(comm: Communicator) -> bool:
        good = repeating_call(comm, "plan")
        bad = Plan([1, 1 + comm.rank], [1, 1], group=comm)
        x = np.zeros(3, np.float32)
        for _ in range(20):
            good()
            with pytest.raises(PeerMismatchError, match="rank 1 sends 2 elements to rank 1, which expects 1"):
                bad(x)
        other = threading.Thread(target=good)
        other.start()
        other.join()
        return True

    assert ranks(2)(work) == [True, True]
