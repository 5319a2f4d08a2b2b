"""Messages between two ranks, beside the collectives of all: they wait for nobody else, and nobody for them."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls import messages
from alltoallv.communicator import Communicator
from alltoallv.numpy.adapter import ADAPTER
from alltoallv.numpy.arrays import Array, as_input, check_apart, check_output, resolve
from alltoallv.numpy.work import Work


class MessageWork(Work):
    """A message under way."""

    @property
    def source(self) -> int:
        """The rank that a received message has come from; -1 before that is known."""
        source: int = self._core.source  # type: ignore[attr-defined]
        return source


def send(
    input: npt.ArrayLike, dst: int, tag: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> None:
    """Sends ``input`` to rank ``dst``; returns when that has received it.

    Args:
        input: Any shape, any dtype of fixed size. Copied first if it is not contiguous.
        dst: A rank of the group, not this one.
        tag: Messages of one pair and one tag are received in the order of their sends.
        timeout: Seconds to wait for the receiver; default: the communicator's.

    Raises:
        InvalidParamError, InvalidTensorError: the arguments, on this rank alone.
        PeerMismatchError: the receiver expects another size or dtype; both ranks raise it, nothing has been written,
            and the communicator stays usable.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
    _message("send", input, dst, tag, group, timeout, waits=True)


def recv(
    out: Array,
    src: int | None = None,
    tag: int = 0,
    *,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> int:
    """Receives into ``out`` what rank ``src`` sends with this tag, or whoever sends first if that is None.

    Args:
        out: Contiguous, of as many elements and the dtype of what is sent.

    Returns:
        The rank that has sent it.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    source: int = _message("recv", out, src, tag, group, timeout, waits=True).source
    return source


def isend(
    input: npt.ArrayLike, dst: int, tag: int = 0, *, group: Communicator | None = None, timeout: float | None = None
) -> MessageWork:
    """`send` that returns at once; the array must not be changed until the work is done."""
    work: MessageWork = _message("send", input, dst, tag, group, timeout)
    return work


def irecv(
    out: Array,
    src: int | None = None,
    tag: int = 0,
    *,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> MessageWork:
    """`recv` that returns at once; the work's result is ``out``, its ``source`` the rank that has sent it.

    Receives of one tag meet messages in the order of their calls. Collectives may be called meanwhile.
    """
    work: MessageWork = _message("recv", out, src, tag, group, timeout)
    return work


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
    """Sends ``input`` to rank ``dst`` and receives into ``out`` from rank ``src`` meanwhile, so that neither waits.

    Args:
        input, out: As for `send` and `recv`; apart in memory.
        dst, src: Ranks of the group, also this one; None for ``src``: whoever sends first with the tag.
        send_tag, recv_tag: The tags of the two messages.
        timeout: Seconds to wait for either; default: the communicator's.

    Returns:
        The rank that ``out`` has come from.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    x = as_input("input", input)
    check_apart(check_output("out", out), x)
    coming = irecv(out, src, recv_tag, group=group, timeout=timeout)
    going = isend(x, dst, send_tag, group=group, timeout=timeout)
    going.wait()
    coming.wait()
    return coming.source


def _message(
    operator: str,
    array: Any,
    peer: int | None,
    tag: int,
    group: Communicator | None,
    timeout: float | None,
    *,
    waits: bool = False,
) -> Any:
    comm, limit = resolve(group), _core.read_timeout(timeout)
    name, result = ("input", None) if operator == "send" else ("out", array)
    message, used = messages.message(ADAPTER, comm, operator, array, peer, tag, waits=waits, name=name)
    return message.run(limit) if waits else MessageWork(comm, message.submit(limit), (used,), lambda: result)
