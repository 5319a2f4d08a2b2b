"""Python objects by pickle, under names that say so: arrays go faster by the other functions.

To unpickle runs what the bytes say: the ranks of a communicator are processes of one user, which trust each other.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from alltoallv import _core
from alltoallv._calls.collectives import check_rank
from alltoallv._calls.counts import packed
from alltoallv._calls.guard import guard
from alltoallv._calls.objects import ByteExchange
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.numpy.arrays import resolve
from alltoallv.numpy.p2p import recv, send


def send_object(
    value: Any, dst: int, tag: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> None:
    """Sends any object that can be pickled to rank ``dst``, which calls `recv_object`. For the rest see `send`.

    Raises:
        InvalidParamError: the object cannot be pickled; and as `send`.
    """
    data = _pickled("value", value)
    send(np.array([len(data)], np.int64), dst, tag, group=group, timeout=timeout)
    send(np.frombuffer(data, np.uint8), dst, tag, group=group, timeout=timeout)


def recv_object(
    src: int | None = None, tag: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> Any:
    """The object that rank ``src`` sends by `send_object` with this tag, or whoever sends first if that is None.

    Raises as `recv`, and what unpickling raises.
    """
    length = np.empty(1, np.int64)
    source = recv(length, src, tag, group=group, timeout=timeout)
    data = np.empty(int(length[0]), np.uint8)
    recv(data, source, tag, group=group, timeout=timeout)
    return pickle.loads(data.data)


def broadcast_object(
    value: Any, root: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> Any:
    """The ``value`` of rank ``root``, on every rank; what others give is not looked at.

    Args:
        value: Any object that can be pickled.
        root: The same on all ranks.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        On the root the object itself, elsewhere a copy. What unpickling raises is raised on that rank alone.

    Raises:
        InvalidParamError: the object cannot be pickled, or ``root`` is no rank; on every rank.
        PeerMismatchError, PeerLostError, CommTimeoutError: as `all_to_all_v`.
    """
    comm = resolve(group)
    with guard(comm, "broadcast"):
        check_rank("root", root, comm.size)
        data = _pickled("value", value) if comm.rank == root else b""
        sends = [len(data) * (j != comm.rank) for j in range(comm.size)]
        exchange = ByteExchange(comm, "broadcast", data, sends, root=root)
        limit = _core.read_timeout(timeout)
    parts = exchange.run(limit)
    return value if comm.rank == root else pickle.loads(parts[root])


def gather_object(
    value: Any, root: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> list[Any] | None:
    """The ``value`` of every rank, in rank order, on rank ``root``; None elsewhere.

    Arguments and errors as of `broadcast_object`.
    """
    comm = resolve(group)
    with guard(comm, "gather"):
        check_rank("root", root, comm.size)
        data = _pickled("value", value)
        sends = [len(data) * (j == root) for j in range(comm.size)]
        exchange = ByteExchange(comm, "gather", data, sends, root=root)
        limit = _core.read_timeout(timeout)
    parts = exchange.run(limit)
    return [pickle.loads(part) for part in parts] if comm.rank == root else None


def scatter_object(
    values: Sequence[Any] | None = None,
    root: int = 0,
    *,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> Any:
    """Entry r of the ``values`` of rank ``root``, on every rank r.

    Args:
        values: On the root: W objects that can be pickled. Elsewhere it is not looked at.

    Other arguments and errors as of `broadcast_object`.
    """
    comm = resolve(group)
    with guard(comm, "scatter"):
        check_rank("root", root, comm.size)
        parts = [b""] * comm.size
        if comm.rank == root:
            if values is None or len(values) != comm.size:
                raise InvalidParamError(f"values is {values}, expected {comm.size} objects on the root, one per rank")
            parts = [_pickled(f"values[{j}]", value) for j, value in enumerate(values)]
        sends = [len(part) for part in parts]
        exchange = ByteExchange(comm, "scatter", b"".join(parts), sends, packed(sends), root)
        limit = _core.read_timeout(timeout)
    return pickle.loads(exchange.run(limit)[root])


def all_gather_object(value: Any, *, group: Communicator | None = None, timeout: float | None = None) -> list[Any]:
    """The ``value`` of every rank, in rank order, on every rank. Arguments and errors as of `broadcast_object`."""
    comm = resolve(group)
    with guard(comm, "all_gather"):
        data = _pickled("value", value)
        exchange = ByteExchange(comm, "all_gather", data, [len(data)] * comm.size)
        limit = _core.read_timeout(timeout)
    return [pickle.loads(part) for part in exchange.run(limit)]


def _pickled(name: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # of many classes
        raise InvalidParamError(f"{name} is a {type(value).__name__} that cannot be pickled ({error})") from error
