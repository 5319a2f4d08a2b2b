"""Sends Python objects by pickle, under names that say so, because the functions for arrays are faster.

Unpickling can run any code that the sender chooses: the ranks must be processes that trust each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alltoallv import _core
from alltoallv._calls import objects
from alltoallv.communicator import Communicator
from alltoallv.numpy.arrays import resolve
from alltoallv.numpy.exchange import front_end

__all__ = ["all_gather_object", "broadcast_object", "gather_object", "recv_object", "scatter_object", "send_object"]


def send_object(
    value: Any, dst: int, tag: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> None:
    """Sends any object that can be pickled to rank ``dst``, which calls `recv_object`; the rest is as in `send`.

    Raises:
        InvalidParamError: the object cannot be pickled; and the errors of `send`.
    """
    objects.send(resolve(group), [value], dst, tag, _core.read_timeout(timeout))


def recv_object(
    src: int | None = None, tag: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> Any:
    """Returns the object that rank ``src`` sends by `send_object` with this tag; ``src=None`` accepts any.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late. Unpickling may
            raise other errors.
    """
    return objects.recv(resolve(group), 1, src, tag, _core.read_timeout(timeout))[0]


def broadcast_object(
    value: Any, root: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> Any:
    """Returns the ``value`` of rank ``root`` on every rank; the values of other ranks are ignored.

    Args:
        value: Any object that can be pickled.
        root: The same on all ranks.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        On the root the object itself, elsewhere a copy. An error of unpickling is raised on that rank alone.

    Raises:
        InvalidParamError: the object cannot be pickled, or ``root`` is not a rank; raised on every rank.
        PeerMismatchError, PeerLostError, CommTimeoutError: as for `all_to_all_v`.
    """
    return front_end.objects("broadcast", group, value, root=("root", root), timeout=timeout)


def gather_object(
    value: Any, root: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> list[Any] | None:
    """Returns the ``value`` of every rank, in rank order, on rank ``root``; None elsewhere.

    Arguments and errors are as for `broadcast_object`.
    """
    gathered: list[Any] | None = front_end.objects("gather", group, value, root=("root", root), timeout=timeout)
    return gathered


def scatter_object(
    values: Sequence[Any] | None = None,
    root: int = 0,
    *,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> Any:
    """Returns entry r of the ``values`` of rank ``root`` on every rank r.

    Args:
        values: On the root, W objects that can be pickled; ignored elsewhere.

    Other arguments and errors are as for `broadcast_object`.
    """
    return front_end.objects("scatter", group, values, root=("root", root), timeout=timeout)


def all_gather_object(value: Any, *, group: Communicator | None = None, timeout: float | None = None) -> list[Any]:
    """Returns the ``value`` of every rank, in rank order. Arguments and errors are as for `broadcast_object`."""
    gathered: list[Any] = front_end.objects("all_gather", group, value, timeout=timeout)
    return gathered
