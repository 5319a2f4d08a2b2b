"""A small call keeps Python's lock, but not while it waits long for a peer: then other threads run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks
from started import wait_for

from alltoallv import Communicator, empty
from alltoallv.errors import PeerMismatchError
from alltoallv.numpy import Plan, all_reduce, all_to_all_v, barrier, broadcast, quantized_all_reduce

SIZE = 3


def small_call(comm: Communicator, kind: str) -> Callable[[], Any]:
    x, y, ones = np.zeros(comm.size, np.float32), empty(comm.size, np.float32), [1] * comm.size
    plan = Plan(ones, ones, group=comm)
    calls: dict[str, Callable[[], Any]] = {
        "plan": lambda: plan(x, y),
        "function": lambda: all_to_all_v(x, ones, ones, group=comm),
        "all_reduce": lambda: all_reduce(x, group=comm),
        "quantized_all_reduce": lambda: quantized_all_reduce(x, group=comm),
        "broadcast": lambda: broadcast(y, 1, group=comm),
        "barrier": lambda: barrier(group=comm),
    }
    return calls[kind]


@pytest.mark.parametrize("kind", ["plan", "function", "all_reduce", "quantized_all_reduce", "broadcast", "barrier"])
def test_a_call_that_waits_long_lets_other_threads_run(launch, kind: str, tmp_path: Path) -> None:
    """Rank 2 comes only after a thread of rank 0, which waits for it, has run."""
    ran = tmp_path / "ran"

    def work(comm: Communicator) -> None:
        call = small_call(comm, kind)
        call()
        if comm.rank == 0:
            threading.Timer(0.3, ran.touch).start()  # by then the call has begun
        elif comm.rank == 2:
            wait_for(ran.exists, "a thread of rank 0 that runs while its call waits", 60)
        call()

    launch(SIZE, work)


def test_a_call_behind_an_asynchronous_one_lets_other_threads_run(ranks, tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    def work(comm: Communicator) -> None:
        call = small_call(comm, "plan")
        call()
        if comm.rank == 1:
            wait_for(ran.exists, "a thread of rank 0 that runs while its call waits for its turn", 60)
        pending = all_to_all_v(np.zeros(SIZE, np.int8), [1] * SIZE, group=comm, async_op=True)[1]
        if comm.rank == 0:
            threading.Timer(0.3, ran.touch).start()
        call()
        pending.wait()

    ranks(SIZE)(work)


@on_ranks(2)
def test_after_an_error_other_threads_can_call(comm: Communicator) -> None:
    good = small_call(comm, "plan")
    bad = Plan([1, 1 + comm.rank], [1, 1], group=comm)
    for _ in range(20):
        with pytest.raises(PeerMismatchError, match=r"rank 1 sends 2 elements to rank 1, which expects 1.*A2A-3010"):
            bad(np.zeros(2 + comm.rank, np.float32))
    other = threading.Thread(target=good)
    other.start()
    other.join()
