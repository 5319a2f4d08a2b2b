"""Messages between two ranks over regions of host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from alltoallv import _core
from alltoallv._calls.adapters import A, Adapter, Region
from alltoallv._calls.collectives import count_of
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError

ANY_RANK, ANY_TAG = -1, -(2**31)
_TAGS = 2**31


@dataclass(slots=True)
class Message:
    """Holds one side of a message that has passed this rank's checks."""

    core: _core.Communicator
    terms: tuple[str, str, int, int, int, int]  # as `_core.Communicator.post` takes it
    at_most: bool = False

    def run(self, timeout: float = -1.0) -> _core.MessageWork:
        return self.core.post(*self.terms, timeout, True, self.at_most)

    def submit(self, timeout: float = -1.0) -> _core.MessageWork:
        return self.core.post(*self.terms, timeout, False, self.at_most)


class P2POp:
    """One message of a batch; a framework's class explains how it refuses an ``op`` that is no isend or irecv."""

    refusal: ClassVar[type[Exception]]
    expected: ClassVar[str]

    def __init__(self, op: Callable[..., Any] | str, tensor: Any, peer: int, group: Any = None, tag: int = 0) -> None:
        name = op if isinstance(op, str) else getattr(op, "__name__", "")
        if name not in ("isend", "irecv"):
            raise self.refusal(f"{self.expected}, but got {op}")
        self.op, self.tensor, self.peer, self.group, self.tag = op, tensor, peer, group, tag
        self.sends = name == "isend"


def post(
    operator: str,
    comm: Communicator,
    dtype: str,
    tensor: Region | None,
    peer: int | None,
    tag: int | None,
    *,
    waits: bool,
    at_most: bool = False,
) -> Message:
    """Returns a ``"send"`` to rank ``peer``, or the ``"recv"`` of what it sends; None: from the rank that sends first.

    So with the tag; ``"probe"`` and ``"look"`` find a message for a receive. ``waits`` makes the call return only when
    the message has been received; ``at_most``: one of fewer elements will do. Without a ``tensor`` a receive takes any
    number of elements: its work has their ``memory``.
    """
    name = "dst" if operator == "send" else "src"
    if operator == "send" or peer is not None:
        _core.checked_rank(name, peer, comm.size)
    peer = ANY_RANK if peer is None else peer
    if waits and peer == comm.rank and operator in ("send", "recv"):
        raise InvalidParamError(
            f"{name} is {peer}, this rank itself, expected another one: a call that waits would never return", id=1142
        )
    any_tag = tag is None and operator != "send"  # negative ones: this package's own (membership.py)
    number = ANY_TAG if any_tag else _core.checked_integer("tag", tag, 0, _TAGS - 1)
    at, count = (0, -1) if tensor is None else (tensor[0], count_of(tensor, dtype))
    return Message(comm.core, (operator, dtype, at, count, peer, number), at_most)


def message(
    adapter: Adapter[A],
    comm: Communicator,
    operator: str,
    tensor: A,
    peer: int | None,
    tag: int | None = 0,
    *,
    waits: bool,
    name: str = "tensor",
    at_most: bool = False,
) -> tuple[Message, A]:
    """Returns the ``"send"`` or ``"recv"`` of the argument ``name``, and the tensor that it uses."""
    x = adapter.read(name, tensor) if operator == "send" else tensor
    dtype = adapter.dtype(x) if operator == "send" else adapter.check_output(name, x)
    return post(operator, comm, dtype, adapter.region(x), peer, tag, waits=waits, at_most=at_most), x
