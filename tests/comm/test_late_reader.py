"""A rank that is stopped while it reads a peer's memory, past the timeout: what it reads later must not count."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from started import process_state, wait_for
from stopped import BYTES, FILL, FOREIGN, MB, OTHER, RECEIVER, SENDER, all_again, counts_of
from trouble import Place, attempt, join, mapped, pids_of, stop_myself, trap

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
    # There the kernel copies, and no page can be a trap.
    ctypes.c_int.in_dll(ctypes.CDLL(None), "stop_in_a_read").value = 1
    return attempt(call)


@pytest.mark.parametrize("path", ["pull", "cma", "staged"])
def test_stopped_receiver_ends_in_an_error_on_both(ranks, path, tmp_path, monkeypatch):
    """The sender gives up and reuses its input; what the receiver reads afterwards must not pass for a result."""

    def work(comm):
        for k in range(5):
            with join(comm.rank, 3, f"try-{k}", comm.domain, path=path) as place:
                pids = pids_of(place)
                failure = None
                if place.rank == SENDER:
                    x = (alltoallv.empty if path == "pull" else np.empty)(BYTES, np.uint8)
                    x[:] = FILL
                    sends, recvs = counts_of(SENDER)
                    failure = attempt(all_to_all_v, x, sends, recvs, group=place, timeout=0.5 * 2**k)
                    wait_for(lambda pid=pids[RECEIVER]: process_state(pid) == "T", "stop")
                    x[:] = FOREIGN
                    if "stopped" not in failure.text:  # a machine so busy that the timeout came before the stop
                        failure = None
                    os.kill(pids[RECEIVER], signal.SIGCONT)
                elif place.rank == RECEIVER:
                    failure = receive_and_stop(place, path, mapped(BYTES))
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

    options = {}
    if path == "cma":
        library, source = tmp_path / "stopped_reads.so", Path(__file__).with_name("stopped_reads.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        monkeypatch.setenv("LD_PRELOAD", str(library))
        options = {"fresh": True, "preloaded": False}
    found = ranks(3, timeout=150, **options)(work)
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
        failure = attempt(all_reduce, x, group=comm, timeout=1.5)
        x[:] = 99
        if comm.rank == 0:
            wait_for(lambda: process_state(pids[1]) == "T", "stop")
            time.sleep(0.3)  # for rank 2 to have given up as well
            os.kill(pids[1], signal.SIGCONT)
        return failure

    found = ranks(3)(work)
    assert {f.name for f in found} == {"CommTimeoutError"}
    assert len({f.text for f in found}) == 1
