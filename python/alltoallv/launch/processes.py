"""Starts children that never outlive their parent, and reports how one ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

# Runs in its own small process: once the pipe from the parent closes, for whatever reason, it kills every
# process group on its list. Lines are "+group" and "-group".
_GUARD = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Guard:
    """Kills registered process groups, with all that their processes started, however this process ends.

    A parent-death signal alone would reach the children but not the grandchildren.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Registers a process group."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Takes a group off the list; call it before its leader is reaped and its number is free again."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Kills the groups that are still registered and ends the guard."""
        if os.getpid() != self._owner or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def die_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when the thread that started it in process ``parent`` ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def child_setup() -> Callable[[], None]:
    """Returns a ``preexec_fn``: the child dies with the thread that started it, and Ctrl-C works in it.

    Only for processes with one thread, which lives as long as the children should.
    """
    parent = os.getpid()

    def setup() -> None:
        die_with_parent(parent)
        # A launcher in the background of a shell script inherits an ignored SIGINT; its ranks must not.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return setup


def kill_group(group: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process group; one that has gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def exit_code(pid: int) -> int | None:
    """Returns how a child has ended, negative for a signal; None while it runs.

    It is not reaped, so that no other process gets its number.
    """
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def describe_exit(code: int) -> str:
    """Returns an exit status in words: "exited with code 3" or, for -9, "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
