"""Messages between two ranks, independent of collectives, and Python objects, between two ranks or all.

Of a message neither rank waits for the other, and no third rank takes part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls import messages
from alltoallv.communicator import Communicator
from alltoallv.dtypes import item_size
from alltoallv.errors import AllToAllVError
from alltoallv.numpy.arrays import ADAPTER, Array, Work, as_input, check_output, region, resolve
from alltoallv.numpy.exchange import front_end

__all__ = [
    "Envelope",
    "MessageWork",
    "all_gather_object",
    "broadcast_object",
    "gather_object",
    "irecv",
    "isend",
    "probe",
    "recv",
    "recv_object",
    "scatter_object",
    "send",
    "send_object",
    "sendrecv",
]


class MessageWork(Work):
    """A message under way, with its sender."""

    @property
    def source(self) -> int:
        """Returns the rank that sent a received message; -1 until that is known."""
        source: int = self._core.source  # type: ignore[attr-defined]
        return source

    @property
    def tag(self) -> int:
        """Returns the tag of a received message, once it is done."""
        tag: int = self._core.tag  # type: ignore[attr-defined]
        return tag

    @property
    def count(self) -> int:
        """Returns the elements of a received message, once it is done."""
        count: int = self._core.count  # type: ignore[attr-defined]
        return count


@dataclass(frozen=True)
class Envelope:
    """What `probe` says of a message: its sender, tag, number of elements and the bytes of all of them."""

    source: int
    tag: int
    count: int
    nbytes: int


def send(
    input: npt.ArrayLike, dst: int, tag: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> None:
    """Sends ``input`` to rank ``dst``; returns when that rank has received it.

    Args:
        input: Any shape, any dtype of fixed size; copied first if it is not contiguous.
        dst: A rank of the group, not this one.
        tag: Messages of one pair and one tag arrive in the order in which they were sent.
        timeout: Seconds to wait for the receiver; default: the communicator's.

    Raises:
        InvalidParamError, InvalidTensorError: an argument is wrong; only this rank raises it.
        PeerMismatchError: the receiver expects another size or dtype; both ranks raise it, nothing is written,
            and the communicator stays usable.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
    message("send", input, dst, tag, group, timeout, waits=True)()


def recv(
    out: Array,
    src: int | None = None,
    tag: int | None = 0,
    *,
    at_most: bool = False,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> int:
    """Receives what rank ``src`` sends with this tag into ``out``; ``src=None`` accepts the first sender.

    Args:
        out: Contiguous, with the dtype and the number of elements of the message.
        tag: None accepts any.
        at_most: The message may have fewer elements: they fill the beginning of ``out``, and the rest keeps its values.
            `irecv` and `probe` tell how many they are.

    Returns:
        The rank that sent it.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    source: int = message("recv", out, src, tag, group, timeout, waits=True, at_most=at_most)().source
    return source


def isend(
    input: npt.ArrayLike, dst: int, tag: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> MessageWork:
    """Sends like `send`, but returns at once; do not change the array until the work is done."""
    work: MessageWork = message("send", input, dst, tag, group, timeout)()
    return work


def irecv(
    out: Array,
    src: int | None = None,
    tag: int | None = 0,
    *,
    at_most: bool = False,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> MessageWork:
    """Receives like `recv`, but returns at once; the work's result is ``out``, its ``source`` is the sender.

    Once done, its ``tag`` and ``count`` are the message's. Receives of one tag match messages in the order of
    their calls. Collectives may be called in between.
    """
    work: MessageWork = message("recv", out, src, tag, group, timeout, at_most=at_most)()
    return work


def probe(
    src: int | None = None,
    tag: int | None = None,
    *,
    wait: bool = True,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> Envelope | None:
    """Returns what is known of the message that `recv` would receive now, which stays where it is.

    Args:
        src, tag: As for `recv`; None accepts any.
        wait: Wait for a message. False: look once; a message that has been sent is seen soon, not at once.
        timeout: Seconds to wait for it; default: the communicator's.

    Returns:
        The message's `Envelope`; None if there is none, with ``wait=False``.

    Raises:
        AllToAllVError: as for `recv`.
    """
    comm, limit = resolve(group), _core.read_timeout(timeout)
    operator = "probe" if wait else "look"
    matched = messages.post(operator, comm, "uint8", (0, 0), src, tag, waits=True).run(limit)
    if matched.source < 0:
        return None
    return Envelope(matched.source, matched.tag, matched.count, matched.count * item_size(matched.dtype))


def sendrecv(
    input: npt.ArrayLike,
    dst: int,
    out: Array,
    src: int | None = None,
    *,
    send_tag: int = 0,
    recv_tag: int = 0,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> int:
    """Sends ``input`` to rank ``dst`` and at the same time receives from rank ``src`` into ``out``, without deadlock.

    Neither message is under way any more when it returns or raises.

    Args:
        input, out: As for `send` and `recv`; they must not overlap.
        dst, src: Ranks of the group, which may be this one; ``src=None`` accepts the first sender with the tag.
        send_tag, recv_tag: The tags of the two messages.
        timeout: Seconds to wait for each of the two; default: the communicator's.

    Returns:
        The rank that sent ``out``.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    x = as_input("input", input)
    _core.check_apart(region(check_output("out", out)), region(x))
    begin_recv = message("recv", out, src, recv_tag, group, timeout)
    begin_send = message("send", x, dst, send_tag, group, timeout)
    coming, going = begin_recv(), begin_send()
    try:
        going.wait()
    except AllToAllVError:
        with contextlib.suppress(AllToAllVError):
            coming.wait()
        raise
    coming.wait()
    source: int = coming.source
    return source


def message(
    operator: str,
    array: Any,
    peer: int | None,
    tag: int | None,
    group: Communicator | None,
    timeout: float | None,
    *,
    waits: bool = False,
    at_most: bool = False,
) -> Callable[[], Any]:
    """Checks a message and returns what starts it."""
    comm, limit = resolve(group), _core.read_timeout(timeout)
    name, result = ("input", None) if operator == "send" else ("out", array)
    post, used = messages.message(ADAPTER, comm, operator, array, peer, tag, waits=waits, name=name, at_most=at_most)
    if waits:
        return lambda: post.run(limit)
    return lambda: MessageWork(comm, post.submit(limit), (used,), lambda: result)


# Python objects travel by pickle, under names that say so, because the functions for arrays are faster. Unpickling can
# run any code that the sender chooses: the ranks must be processes that trust each other.


def send_object(
    value: Any, dst: int, tag: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> None:
    """Sends any object that can be pickled to rank ``dst``, which calls `recv_object`; the rest is as in `send`.

    Raises:
        InvalidParamError: the object cannot be pickled; and the errors of `send`.
    """
    messages.send(resolve(group), [value], dst, tag, _core.read_timeout(timeout))


def recv_object(
    src: int | None = None, tag: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> Any:
    """Returns the object that rank ``src`` sends by `send_object` with this tag; ``src=None`` accepts any.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late. Unpickling may
            raise other errors.
    """
    return messages.recv(resolve(group), 1, src, tag, _core.read_timeout(timeout))[0]


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
