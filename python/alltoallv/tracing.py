"""Records the traffic: what every operator of a rank moves, to whom, and how long it waits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from alltoallv import _core
from alltoallv.errors import InvalidParamError


@contextlib.contextmanager
def trace(folder: str | os.PathLike[str], *, most_bytes: int = 1 << 30) -> Iterator[None]:
    """Records what this process's operators do inside the block, for ``python -m alltoallv trace FOLDER``.

    Not collective: each rank that should appear enters a block of its own, usually all of them with the same folder.
    ``ALLTOALLV_TRACE=FOLDER`` in the environment does the same from the first communicator on, without a block.

    It records collectives and messages of communicators in shared memory, and what ranks on several hosts or on
    devices agree about over them: operator, domain, sequence number, begin, end, the time waited for peers, and the
    elements for each rank. Each rank and domain has one file ``*.trace`` in the folder. A record takes 56 bytes and
    8 per rank. Once a file is full a warning says so, and what comes later is left out.

    Args:
        folder: Where the files go; it is made if need be.
        most_bytes: How large a file may become, in bytes, 4,096 or more.

    Raises:
        InvalidParamError: the folder cannot be made or written, or most_bytes is no such number.
    """
    try:
        path = os.path.abspath(os.fsdecode(folder))
        os.makedirs(path, exist_ok=True)
    except (OSError, TypeError, ValueError) as error:
        raise InvalidParamError(
            f"folder is {str(folder)!r}, expected one that can be made ({error})", id=1461
        ) from None
    if not os.access(path, os.W_OK):
        raise InvalidParamError(f"folder is {path!r}, expected one that this process may write", id=1462)
    if not (isinstance(most_bytes, int) and 4096 <= most_bytes < 1 << 63):
        raise InvalidParamError(f"most_bytes is {most_bytes!r}, expected a number of bytes from 4096 on", id=1463)
    before = _core.set_trace_target(os.fsencode(path), most_bytes)
    try:
        yield
    finally:
        _core.set_trace_target(*before)
