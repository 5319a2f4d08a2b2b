"""Starts children that never outlive their parent, reports how one ended, and finds which processes started us."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

# Processes that start ranks; a rank's nearest ancestor with such a name identifies its job.
_LAUNCHER_NAMES = ("hydra", "pmi_proxy", "mpiexec", "mpirun", "prte", "orted", "slurmstepd", "msrun")

_START_SECONDS = 5.0  # between the starts of a host's first and last rank

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


def launcher_process(variable: str) -> str:
    """Identifies the process that started the ranks.

    It is this process's nearest ancestor that is a launcher by name, or whose environment lacks ``variable``.
    Shells and wrappers between the two do not matter.
    """
    return process_id(_launcher(variable))


def launcher_number(variable: str, option: str) -> int | None:
    """Returns the number in that process's command, as in ``--option=4`` or ``--option 4``; None if none above 0.

    So one learns what a launcher such as msrun passes to its ranks in no variable.
    """
    try:
        with open(f"/proc/{_launcher(variable)}/cmdline", errors="replace") as file:
            words = file.read().replace("=", "\0").split("\0")
    except OSError:
        return None
    number = words[words.index(option) + 1] if option in words else ""
    return int(number) or None if number.isdecimal() else None


def ranks_here(variable: str, expected: int) -> int | None:
    """Returns how many ranks the process that started this one has started on this host.

    None if the program itself has set ``variable``, so that other processes do not show it either.

    Args:
        variable: The one that holds a rank's number.
        expected: The number of ranks after which there is nothing to wait for; others may be about to start.
    """
    try:
        if _value(os.getpid(), variable) is None:
            return None
    except OSError:  # there is no /proc
        return None
    launcher, end, found = _launcher(variable), time.monotonic() + _START_SECONDS, set()
    while True:
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                rank = _value(int(pid), variable)
                if rank is not None and _launcher(variable, int(pid)) == launcher:
                    found.add(rank)
        if len(found) >= expected or time.monotonic() >= end:
            return len(found)
        time.sleep(0.1)


def _value(pid: int, variable: str) -> bytes | None:
    """Returns the variable in the environment with which a process was started; None without it."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        marker = variable.encode() + b"="
        return next((entry[len(marker) :] for entry in file.read().split(b"\0") if entry.startswith(marker)), None)


def _launcher(variable: str, rank: int | None = None) -> int:
    pid = os.getppid() if rank is None else int(_stat_fields(rank)[1])
    while pid > 1:
        try:
            with open(f"/proc/{pid}/comm") as file:
                name = file.read().strip()
            value = _value(pid, variable)
            parent = int(_stat_fields(pid)[1])
        except OSError:  # another user's process: certainly none of the ranks
            break
        if name.startswith(_LAUNCHER_NAMES) or value is None:
            break
        pid = parent
    return pid


def process_id(pid: int) -> str:
    """Returns a process's number, start time and pid namespace, which are unique on a host between two boots."""
    try:
        started = _stat_fields(pid)[19]
    except OSError:
        started = "?"
    return f"{pid}.{started}:{pid_namespace()}"


def _stat_fields(pid: int) -> list[str]:
    """Returns the fields of /proc/<pid>/stat after the command name: [0] state, [1] parent, [19] start time."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def pid_namespace() -> str:
    """Returns the namespace in which this process's pids are unique."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
