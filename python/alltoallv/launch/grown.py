"""Lets a process that replaces a lost rank find the job that its own has grown into, which its launcher does not know.

Every rank of a job that has grown holds an abstract Unix socket, until it ends; its name, which the kernel lists, says
into which one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
from pathlib import Path

from alltoallv.launch.job import GROWN, GROWN_HOSTS, Launch, grown_job

_held: dict[str, socket.socket] = {}  # by beginning of the name


def announce(job: Launch, domain: str, grown: Launch) -> None:
    """Says that a job's ranks in a domain are, with others, the ranks of another job from now on."""
    withdraw(job, domain)
    own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.bind(f"\0{_beginning(job, domain)}{job.rank}-{grown.size}-{grown.name}")
    own.listen(1024)  # who asks is not answered: the name says all
    _held[_beginning(job, domain)] = own


def withdraw(job: Launch, domain: str) -> None:
    """Says that the ranks of a job meet in this job again."""
    if (own := _held.pop(_beginning(job, domain), None)) is not None:
        own.close()


def follow(job: Launch, domain: str) -> Launch:
    """Returns the job that a job, through others perhaps, has grown into as far as this host knows; or itself."""
    beginning = f"@{_beginning(job, domain)}"
    names = ""
    with contextlib.suppress(OSError):
        names = Path("/proc/net/unix").read_text("utf-8", "replace")
    for line in names.splitlines():
        name = line.rpartition(" ")[2]
        size, _, grown = name.removeprefix(beginning).partition("-")[2].partition("-")
        if name.startswith(beginning) and size.isdecimal() and grown.startswith(GROWN) and _is_own(name):
            successor = grown_job(grown, job.rank, int(size), job.root() if grown.startswith(GROWN_HOSTS) else None)
            announce(job, domain, successor)
            return follow(successor, domain)
    return job


def _beginning(job: Launch, domain: str) -> str:
    text = f"{os.geteuid()}\n{job.key}\n{domain}"
    return f"alltoallv-grown-{hashlib.sha256(text.encode()).hexdigest()[:24]}-"


def _is_own(name: str) -> bool:
    """Returns whether a process of this user holds the name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking, contextlib.suppress(OSError):
        asking.setblocking(False)
        asking.connect(f"\0{name[1:]}")
        _, user, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(user) == os.geteuid()
    return False


def _forget() -> None:
    for own in _held.values():
        own.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget)
