"""Finds which processes started this one, and which of them made it a rank."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from alltoallv.launch.variables import Environ

_START_SECONDS = 5.0  # between the starts of a host's first and last rank

# Processes that start all of a job's ranks on a host. Others, such as shells, may start one rank each.
_LAUNCHERS = ("hydra", "pmi_proxy", "mpiexec", "mpirun", "prte", "orted", "slurmstepd", "msrun")


_forked: dict[int, dict[str, str]] = {}  # what a process began with that was forked to be a rank, by its number


@dataclass(frozen=True)
class Process:
    """A process: its number, when it started, its name, and the environment that it started with."""

    pid: int
    started: str
    name: str
    environ: dict[str, str]

    def __str__(self) -> str:
        return f"{self.pid}.{self.started}:{pid_namespace()}"


@dataclass(frozen=True)
class Setter:
    """The process that gave this one a launcher's variables.

    Attributes:
        process: It; None where nothing can be read.
        distance: How many processes up from this one, 0 for this one itself; inf where all ancestors have the same.
        before: The environment without these variables, or with an outer job's.
    """

    process: Process | None
    distance: float
    before: Environ

    @property
    def is_launcher(self) -> bool:
        """True for a process that starts all of a job's ranks on this host, by its name."""
        return self.process is not None and self.process.name.startswith(_LAUNCHERS) and math.isfinite(self.distance)

    @property
    def depth(self) -> int:
        """Returns how many processes up the process is that started this rank: a parent where that is not known."""
        return int(self.distance) if 0 < self.distance < math.inf else 1

    def __str__(self) -> str:
        return str(self.process or process_id(os.getppid()))


def setter(env: Environ, names: Sequence[str]) -> Setter:
    """Returns which process gave this one variables of a launcher: its nearest ancestor that has others, or none.

    Shells and wrappers between the two have the same variables. A program that sets its own was told by its parent.

    Args:
        env: The environment now.
        names: The variables; the first two hold the rank and the number of ranks.
    """
    line = _own_line(os.getpid())
    if not line:
        return Setter(None, math.inf, {})
    own, *ancestors = line
    began = [own.environ.get(name) for name in names]
    now = [env.get(name) for name in names]
    if now[:2] != began[:2] or (now != began and _is_child()):
        return Setter(ancestors[0] if ancestors else None, 0, own.environ)
    return _starter(os.getpid(), tuple(names))


@functools.lru_cache(64)  # what was found stays, though processes end
def _starter(pid: int, names: tuple[str, ...]) -> Setter:
    line = _own_line(pid)
    nearest = _differing(line, names)
    for distance in range(1, len(line) if math.isinf(nearest.distance) else int(nearest.distance)):
        # It has the same variables, but may have given this rank its own number: then it gave others another one.
        if any(other not in (None, line[0].environ.get(names[0])) for other in _given(line[distance].pid, names[0])):
            return Setter(line[distance], distance, line[distance].environ)
    return nearest


def _differing(line: Sequence[Process], names: Sequence[str]) -> Setter:
    """Returns the nearest ancestor of the first process that is a launcher by name, or began with other variables."""
    own, *ancestors = line
    began = [own.environ.get(name) for name in names]
    for distance, process in enumerate(ancestors, 1):
        if process.name.startswith(_LAUNCHERS) or [process.environ.get(name) for name in names] != began:
            return Setter(process, distance, process.environ)
    return Setter(ancestors[-1] if ancestors else None, math.inf, {})


def _given(pid: int, name: str) -> Iterator[str | None]:
    """Yields the variable's value in each child of a process."""
    for child in _children(pid):
        with contextlib.suppress(OSError):
            yield _read(child).environ.get(name)


def _children(pid: int) -> list[int]:
    return [child for child in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _parent(child) == pid]


def strangers(depth: int, peers: Mapping[int, int], size: int) -> tuple[list[int], list[int]]:
    """Returns which peers another process has started, where the one that started this rank has started all ranks.

    All, that are as many processes with this one's command, apart from numbers, as there are ranks. A shell or a
    program that has started fewer may have left others to somebody else.

    Args:
        depth: How many processes above this one is the one that started this rank.
        peers: Numbers of processes on this host, by rank.
        size: The number of ranks.

    Returns:
        Those ranks; and where there are any, the processes that were started with this one and are no peers.
    """
    line = _own_line(os.getpid())
    if len(line) <= depth:
        return [], []
    starter, below = line[depth].pid, line[depth - 1].pid
    outside = [rank for rank, pid in peers.items() if not _is_below(pid, starter)]
    if not outside:
        return [], []
    command = _command(below)
    alike = [child for child in _children(starter) if _command(child) == command]
    if len(alike) < size:
        return [], []
    return outside, [child for child in alike if not any(_is_below(pid, child) for pid in peers.values())]


def runs(pid: int) -> bool:
    """True while a process runs; it may have ended without its parent's notice."""
    return bool(_command(pid))


def _is_below(pid: int | None, ancestor: int) -> bool:
    while pid and pid != ancestor:
        pid = _parent(pid)
    return pid == ancestor


def _command(pid: int) -> bytes | None:
    """Returns a process's command without its numbers."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return re.sub(rb"\d+", b"0", file.read())
    except OSError:
        return None


def _parent(pid: int) -> int | None:
    try:
        return int(_stat(pid)[1])
    except OSError:
        return None


def _is_child() -> bool:
    """True in a process that a program started by multiprocessing, such as a rank of torch's spawn()."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def _line(pid: int) -> tuple[Process, ...]:
    """Returns a process and its ancestors, the nearest first, as far as they can be read."""
    line = list[Process]()
    with contextlib.suppress(OSError):
        while pid > 0:
            line.append(_read(pid))
            pid = int(_stat(pid)[1])
    return tuple(line)


def began_with(environ: dict[str, str]) -> None:
    """Makes this the environment that this process started with: it was forked, and /proc shows another's."""
    _forked[os.getpid()] = environ
    _own_line.cache_clear()
    _starter.cache_clear()


@functools.lru_cache(1)  # a launcher may end before its ranks
def _own_line(pid: int) -> tuple[Process, ...]:
    """Returns this process and its ancestors; nothing where /proc belongs to another pid namespace."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") == str(pid):
            return _line(pid)
    return ()


def _read(pid: int) -> Process:
    with open(f"/proc/{pid}/comm", errors="replace") as file:
        name = file.read().strip()
    started = _stat(pid)[19]
    if pid in _forked:
        return Process(pid, started, name, _forked[pid])
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = (entry.partition(b"=") for entry in file.read().split(b"\0"))
        environ = {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}
    except OSError:  # another user's process: certainly none of the ranks
        environ = {}
    return Process(pid, started, name, environ)


def number_of(process: Process | None, option: str) -> int | None:
    """Returns the number in a process's command, as in ``--option=4`` or ``--option 4``; None if none above 0.

    So one learns what a launcher such as msrun passes to its ranks in no variable.
    """
    try:
        with open(f"/proc/{process.pid if process else 0}/cmdline", errors="replace") as file:
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
    own = _own_line(os.getpid())
    if not own or variable not in own[0].environ:
        return None
    launcher, end, ranks = _starter(os.getpid(), (variable,)).process, time.monotonic() + _START_SECONDS, set()
    while True:
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            line = _line(int(pid))
            rank = line[0].environ.get(variable) if line else None  # it has ended, or is another user's
            if rank is None:
                continue
            # Up to the launcher there may be shells and wrappers, but no rank of another job.
            for process in line[1:]:
                if _is_same(process, launcher):
                    ranks.add(rank)
                if process.environ.get(variable) not in (None, rank):
                    break
        if len(ranks) >= expected or time.monotonic() >= end:
            return len(ranks)
        time.sleep(0.1)


def _is_same(process: Process | None, other: Process | None) -> bool:
    return (process and (process.pid, process.started)) == (other and (other.pid, other.started))


def process_id(pid: int) -> str:
    """Returns a process's number, start time and pid namespace, which are unique on a host between two boots."""
    try:
        started = _stat(pid)[19]
    except OSError:
        started = "?"
    return f"{pid}.{started}:{pid_namespace()}"


def is_ancestor(pid: int) -> bool:
    """True if that process has started this one, or one that has."""
    return any(process.pid == pid for process in _own_line(os.getpid())[1:])


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/<pid>/stat after the command name: [0] state, [1] parent, [19] start time."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def pid_namespace() -> str:
    """Returns the namespace in which this process's pids are unique."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
