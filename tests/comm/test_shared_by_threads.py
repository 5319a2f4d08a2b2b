"""Threads that call one communicator at once: ranks may take their calls in different orders, so it is an error."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from on_ranks import on_ranks
from started import process_state, wait_for
from trouble import check_works, join, on_threads

from alltoallv.errors import PeerLostError, PeerMismatchError
from alltoallv.numpy import all_reduce, barrier


@on_ranks(2, communicator=False)
def test_two_threads_at_once(rank, size):
    """Rank 1 comes when both are in a call. Then its first call has met one of them, and nobody knows which."""
    comm, meeting = join(rank, size, timeout=30), join(rank, size, domain="meeting", timeout=30)
    barrier(group=comm)
    errors = []

    def use(addend):
        try:
            for _ in range(2):
                all_reduce(np.full(20_000, addend), group=comm)
        except (PeerMismatchError, PeerLostError) as error:
            errors.append(error)
            comm.abort()

    if rank == 0:
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(use, addend) for addend in (1, 1000)]
            wait_for(both_are_calling, "two calls")
            barrier(group=meeting)
            for call in calls:
                call.result()
        assert len(errors) == 2
        assert any("two threads of rank 0" in str(error) for error in errors if isinstance(error, PeerMismatchError))
    else:
        barrier(group=meeting)
        use(1)
        assert len(errors) == 1
    comm.destroy()
    meeting.destroy()


def both_are_calling() -> bool:
    """For a while, and asleep, so that neither is on its way into the call."""
    for _ in range(20):
        frames = {thread: sys._current_frames().get(thread.ident) for thread in threading.enumerate()}
        calling = [thread for thread, frame in frames.items() if frame and frame.f_code is all_reduce.__code__]
        if [process_state(thread.native_id) for thread in calling] != ["S", "S"]:
            return False
        time.sleep(0.005)
    return True


@on_ranks(2, communicator=False)
def test_one_after_the_other(rank, size):
    """Any thread may call while no other does; also beside asynchronous calls that are pending."""
    comm = join(rank, size, timeout=30)
    for _ in range(20):
        pending = barrier(group=comm, async_op=True)
        on_threads(check_works, [comm])
        pending.wait()
        check_works(comm)
    comm.destroy()
