"""A thread waits in a communicator while the program ends, or drops the communicator: neither hangs nor crashes."""

from __future__ import annotations

import subprocess
import sys

import pytest

KINDS = ("call", "pending", "message")

WAITS = """
import sys, threading, time
import numpy as np
from alltoallv import Communicator
from alltoallv.errors import AllToAllVError
from alltoallv.numpy import barrier, irecv, recv

kind = sys.argv[1]
comms = Communicator.threads(2, timeout=60)
x = np.zeros(4, np.float32)
"""

ENDS = """
def use():
    while True:
        try:
            if kind == "call":
                barrier(group=comms[0])
            elif kind == "pending":
                barrier(group=comms[0], async_op=True).wait()
            else:
                recv(x, 1, group=comms[0])
        except AllToAllVError:
            pass

threading.Thread(target=use, daemon=True).start()
time.sleep(0.1)
print("ends", flush=True)
"""

DROPS = """
for _ in range(5):
    pending = irecv(x, 1, group=comms[0]) if kind == "message" else barrier(group=comms[0], async_op=True)

    def wait(pending=pending):
        try:
            pending.wait()
        except AllToAllVError as error:
            print(error, flush=True)

    thread = threading.Thread(target=wait)
    thread.start()
    end = time.monotonic() + 0.05
    while time.monotonic() < end:  # Python code, so that the waiting thread asks for the lock
        pass
    comms.clear()
    thread.join()
    comms = Communicator.threads(2, timeout=60)
"""


def said(program: str, kind: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", WAITS + program, kind], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_daemon_thread_calls_when_the_program_ends(kind: str) -> None:
    """It goes on to call after the communicators have ended."""
    for _ in range(3):
        assert said(ENDS, kind) == ["ends"]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_last_reference_is_dropped_while_a_thread_waits(kind: str) -> None:
    errors = said(DROPS, kind)
    assert len(errors) == 5
    assert all("destroyed while" in error or "rank 1 has left" in error for error in errors), errors
