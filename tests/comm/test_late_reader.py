"""A rank that is stopped while it reads a peer's memory, past the timeout: what it reads later must not count."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import numpy as np
import pytest
from stopped import BYTES, FILL, FOREIGN, MB, OTHER, RECEIVER, SENDER, all_again, counts_of
from trouble import Place, attempt, join, mapped, pids_of, process_state, stop_myself, trap, wait_for, watching

import alltoallv
from alltoallv.errors import CommTimeoutError
from alltoallv.numpy import all_gather, all_reduce, all_to_all_v


def receive_and_stop(comm, path: str, out: np.ndarray):
    """The receiver's part, with the sender's data in the sender's memory."""
    sends, recvs = counts_of(RECEIVER, out.size)
    call = lambda: all_to_all_v(out[:0].copy(), sends, recvs, out=out, group=comm)  # noqa: E731
    if path != "cma":
        with trap(out.ctypes.data + 9 * MB + 4096, stop_myself):
            return attempt(call)
    # There the kernel copies, in large pieces, and no page can be a trap.
    with watching(lambda: bool(out[0] == FILL), stop_myself), suppress(AssertionError):
        return attempt(call)
    return None


@pytest.mark.parametrize("path", ["pull", "cma", "staged"])
def test_stopped_receiver_ends_in_an_error_on_both(ranks, path):
    """The sender gives up and reuses its input; what the receiver reads afterwards must not pass for a result."""

    def work(comm):
        amount = 3 * BYTES if path == "cma" else BYTES
        for k in range(20):
            with join(comm.rank, 3, f"try-{k}", comm.domain, path=path) as place:
                pids = pids_of(place)
                failure = None
                if place.rank == SENDER:
                    x = (alltoallv.empty if path == "pull" else np.empty)(amount, np.uint8)
                    x[:] = FILL
                    sends, recvs = counts_of(SENDER, amount)
                    limit = min(0.4 * 1.5**k, 5.0)  # where processors are busy the stop takes longer
                    with suppress(AssertionError):
                        failure = attempt(all_to_all_v, x, sends, recvs, group=place, timeout=limit)
                    if failure is not None:
                        wait_for(lambda pid=pids[RECEIVER]: process_state(pid) == "T", "stop")
                        x[:] = FOREIGN
                        if "stopped" not in failure.text:  # a machine so busy that the timeout came before the stop
                            failure = None
                    else:
                        time.sleep(0.05)  # it has just finished: the stop may be on its way
                    os.kill(pids[RECEIVER], signal.SIGCONT)
                elif place.rank == RECEIVER:
                    out = mapped(amount)
                    failure = receive_and_stop(place, path, out)
                    if failure is None:
                        assert (out == FILL).all(), "a call succeeded with wrong data"
                else:
                    sends, recvs = counts_of(OTHER)
                    with suppress(CommTimeoutError):
                        all_to_all_v(np.empty(0, np.uint8), sends, recvs, group=place)
                    place.destroy()
            hit = all_gather(np.array([failure is not None]), group=comm)[SENDER, 0]
            if hit:
                all_again(comm, "end")
                return failure
        raise AssertionError("no attempt hit the copy")

    found = ranks(3, timeout=150)(work)
    assert found[SENDER].name == found[RECEIVER].name == "CommTimeoutError"
    assert found[SENDER].text == found[RECEIVER].text
    assert f"for rank {RECEIVER} (pid " in found[SENDER].text
    assert "stopped" in found[SENDER].text


def test_stopped_in_a_reduction(ranks):
    """Peers' inputs are read in place: a rank that goes on late must not return a sum of what lies there by then."""

    def work(comm):
        n = 600_000
        x = alltoallv.empty(n, np.int64)
        x[:] = comm.rank + 1
        assert (all_reduce(x, group=comm) == 6).all()
        assert comm.stats()["bytes_pull"] > 0, "the inputs were not read in place"
        pids = pids_of(comm)
        last_read = x.ctypes.data + 2 * x.nbytes // 3 - 8192  # the end of rank 1's part, in rank 0's input
        places = all_gather(np.array([Place.of(last_read).inode, Place.of(last_read).offset], np.int64), group=comm)
        if comm.rank == 1:
            place = Place(str(places[0, 0]), int(places[0, 1]))
            with trap(place.here(), stop_myself):
                return attempt(all_reduce, x, group=comm)
        failure = attempt(all_reduce, x, group=comm, timeout=0.5)
        x[:] = 99
        if comm.rank == 0:
            wait_for(lambda: process_state(pids[1]) == "T", "stop")
            time.sleep(0.3)  # for rank 2 to have given up, too
            os.kill(pids[1], signal.SIGCONT)
        return failure

    found = ranks(3)(work)
    assert {f.name for f in found} == {"CommTimeoutError"}
    assert len({f.text for f in found}) == 1
