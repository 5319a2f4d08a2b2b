"""Lets one process at a time be a certain rank of a job: one that only an address tells from others, or whose lost
ranks are replaced.

The process holds a name, until it ends: an abstract Unix socket, whose holder the kernel knows.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
import threading
import time

from alltoallv.errors import InvalidParamError
from alltoallv.launch.ancestry import is_ancestor

CURE = (
    "another job has the same address, or a process of an earlier one is left; give each job an address of its own, or "
    "end that process"
)
_PATIENCE = 3.0  # seconds for the holder to end: it may be of an earlier job that is just ending
_SILENCE = 0.05  # seconds for one that has taken its name to listen
_UNKNOWN = 0  # a holder of whom too many have asked
_NAMES = 16  # another user may hold some of them
_held: dict[str, tuple[int, socket.socket]] = {}  # by job
_contested: set[str] = set()  # jobs
_lock = threading.RLock()  # the garbage collector may call `leave` inside `take`


def take(job: str, rank: int, what: str, patience: float = _PATIENCE, cure: str = CURE) -> None:
    """Makes this process the only one that is this rank of a job; it is no other rank of it any more.

    A process that has started this one may be the same rank.

    Args:
        job: Equal on all ranks of a job, and of others from which it cannot be told.
        what: The rank in words, for the error.
        patience: Seconds to wait while another process is the rank.
        cure: The end of the error.

    Raises:
        InvalidParamError: another process of this user has it.
    """
    end, pause = time.monotonic() + min(patience, _PATIENCE), 0.005
    with _lock:
        if job in _held and _held[job][0] != rank:
            leave(job)
        while job not in _held:
            holder = _try(job, rank)
            if holder is None or (holder != _UNKNOWN and is_ancestor(holder)):
                return
            if time.monotonic() >= end:
                process = "another process" if holder == _UNKNOWN else f"process {holder}"
                raise InvalidParamError(f"{what} is {process} already: {cure}", id=1298)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)


def leave(job: str) -> None:
    """Gives up the rank of a job that this process has, if any."""
    with _lock:
        if job in _held:
            _held.pop(job)[1].close()
            _contested.discard(job)


def contested(job: str) -> bool:
    """Whether another process has asked for the rank that this one has; it may have ended since."""
    with _lock:
        if job not in _held:
            return False
        own = _held[job][1]
        own.setblocking(False)
        try:
            own.accept()[0].close()
        except BlockingIOError:
            return job in _contested
        _contested.add(job)
        return True


def is_taken(job: str, rank: int) -> bool:
    """Whether a process of this user is that rank of a job now."""
    for attempt in range(_NAMES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.setblocking(False)
            status = asking.connect_ex(_name(job, rank, attempt))
            if status == 0 and _peer(asking)[1] != os.geteuid():
                continue
            return status in (0, errno.EAGAIN)
    return False


def _try(job: str, rank: int) -> int | None:
    """Takes the rank's name, and returns None; or returns the process of this user that has it."""
    for attempt in range(_NAMES):
        name = _name(job, rank, attempt)
        own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            own.bind(name)
            own.listen(64)
        except OSError as error:
            own.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            _held[job] = rank, own
            return None
        holder = _holder(name)
        if holder is not None:
            return holder
    return None  # other users have all names: the job goes without


def _name(job: str, rank: int, attempt: int) -> str:
    text = f"{os.geteuid()} {attempt} {rank} {job}"
    return f"\0alltoallv-seat-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Returns process and user at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = map(int, struct.unpack("3i", credentials))
    return pid, user


def _holder(name: str) -> int | None:
    """Returns the process of this user that has the name; None if it is another user's, or only its child is left.

    Nobody accepts the connections by which others ask, so that at some time there is no room for more of them.
    """
    end = time.monotonic() + _SILENCE
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.setblocking(False)
            status = asking.connect_ex(name)
            if status == errno.EAGAIN:
                return _UNKNOWN
            if status == 0:
                pid, user = _peer(asking)
                break
        if time.monotonic() >= end:
            return None
        time.sleep(0.001)
    return pid if user == os.geteuid() and _lives(pid) else None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _forget() -> None:
    global _lock
    _lock = threading.RLock()
    for _, own in _held.values():
        own.close()
    _held.clear()
    _contested.clear()


os.register_at_fork(after_in_child=_forget)
