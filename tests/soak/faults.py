"""The kinds of faults: what the victim does, which errors must come, and on whom."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from case import Arguments
from scarcity import no_more_descriptors, no_more_memory
from started import process_state, wait_for
from trouble import stamp

TIMEOUT = 0.4  # of a call that a victim keeps waiting for too long, in seconds
MISMATCH = ("PeerMismatchError",)


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        group: Its heading in the table.
        peers: Classes of which the other ranks' error must be one; empty: there must be none.
        victim: Classes of the victim's own; None: it has ended.
        lasting: Whether the communicator is unusable afterwards.
        inside: The cause comes from a thread at a random moment, whatever the rank is doing then.
    """

    group: str
    peers: tuple[str, ...]
    victim: tuple[str, ...] | None
    lasting: bool = False
    inside: bool = False


_LOST, _LATE = ("PeerLostError",), ("CommTimeoutError",)
_STARVED = ("ResourceError", "OutOfMemoryError", "MemoryError")
KINDS: dict[str, Kind] = {
    "SIGKILL": Kind("killed", _LOST, None, True),
    "SIGKILL inside": Kind("killed", _LOST, None, True, True),
    "SIGTERM": Kind("killed", _LOST, None, True),
    "exit": Kind("killed", _LOST, None, True),
    "abort": Kind("aborts", _LOST, _LOST, True),
    "stopped": Kind("stopped", _LATE, (*_LATE, *_LOST), True),
    "stopped inside": Kind("stopped", _LATE, (*_LATE, *_LOST), True, True),
    "paused": Kind("delayed", (), ()),
    "late": Kind("delayed", _LATE, (*_LATE, *_LOST), True),
    "delayed": Kind("delayed", (), ()),
    "descriptors": Kind("starved", _STARVED, _STARVED),
    "address space": Kind("starved", _STARVED, _STARVED),
    "counts": Kind("disagrees", MISMATCH, MISMATCH),
    "dtype": Kind("disagrees", MISMATCH, MISMATCH),
    "operator": Kind("disagrees", MISMATCH, MISMATCH),
    "order": Kind("disagrees", MISMATCH, MISMATCH),
    "shape": Kind("disagrees", MISMATCH, MISMATCH),
    "argument": Kind("disagrees", ("InvalidParamError",), ("InvalidParamError",)),
}

_ENDS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGKILL inside": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "exit": lambda: os._exit(3),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stopped inside": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "paused": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "delayed": lambda: time.sleep(0.05),
    "late": lambda: time.sleep(TIMEOUT + 0.3),
}


def strike(kind: str, comm: Any, cause: Path, after: float) -> None:
    """What the victim does, at once or, on a thread, ``after`` seconds; the moment is noted in ``cause``."""

    def act() -> None:
        stamp(cause)
        if kind == "abort":
            comm.abort()
        else:
            _ENDS[kind]()

    if KINDS[kind].inside:
        timer = threading.Timer(after, act)
        timer.daemon = True
        timer.start()
    elif kind in _ENDS or kind == "abort":
        act()


@contextmanager
def continued(pid: int, after: float) -> Iterator[None]:
    """A process that stops itself goes on ``after`` so many seconds."""

    def wake() -> None:
        wait_for(lambda: process_state(pid) in ("T", ""), f"SIGSTOP of pid {pid}")
        time.sleep(after)
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=wake)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def starved(kind: str) -> AbstractContextManager[None]:
    """The process has no more descriptors, or next to no address space."""
    return no_more_descriptors() if kind == "descriptors" else no_more_memory()


def mistaken(kind: str, arguments: Arguments, rank: int) -> tuple[str, Arguments]:
    """The victim's call instead of the others' ``all_to_all_v`` or, of "dtype" and "shape", ``all_reduce``."""
    if kind == "counts":
        counts = list(arguments["send_counts"])
        counts[rank - 1] += 1
        x = arguments["input"]
        return "all_to_all_v", {**arguments, "send_counts": counts, "input": np.resize(x, (len(x) + 1, *x.shape[1:]))}
    if kind == "argument":
        return "all_to_all_v", {**arguments, "send_counts": [-1] * len(arguments["send_counts"])}
    if kind == "dtype":
        x = arguments["input"]
        return "all_reduce", {**arguments, "input": x.astype("int16" if x.dtype != "int16" else "int32"), "op": "sum"}
    if kind == "shape":
        return "all_reduce", {**arguments, "input": np.resize(arguments["input"], (len(arguments["input"]) + 1, 2))}
    return "barrier", {}
