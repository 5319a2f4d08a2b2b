"""Messages between two ranks over regions of host memory, and Python objects that travel in them or in exchanges."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from alltoallv import _core, memory
from alltoallv._calls.adapters import A, Adapter, Region
from alltoallv._calls.collectives import count_of
from alltoallv._calls.counts import packed
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


# Picklable objects travel as bytes of any length, which the receivers do not know before. To unpickle runs what the
# bytes say: the ranks of a communicator are processes of one user, which trust each other.


Run = Callable[[float], Any]  # returns an exchange's result; takes the timeout, below 0 for the communicator's


def _exchange(
    comm: Communicator,
    operator: str,
    data: bytes,
    sends: Sequence[int],
    sdispls: Sequence[int] | None = None,
    root: int = 0,
    result: Callable[[list[Any]], Any] = lambda arrived: arrived,
) -> Run:
    """Plans an exchange, under the guard: ``sends[j]`` bytes from ``sdispls[j]`` of ``data`` go to rank j.

    ``result`` makes the call's result of the objects that arrive, by rank.
    """
    begins = [0] * comm.size if sdispls is None else sdispls
    plan = _core.Plan(comm.core, operator, "uint8", sends, begins, [], [], root)
    array = np.frombuffer(data, np.uint8)

    def run(timeout: float) -> Any:
        block, sizes = plan.run_learning(_core.buffer_address(array), timeout)
        return result(loads(memory.from_block(block, (sum(sizes),), np.dtype(np.uint8)).data, sizes))

    return run


def all_gather(comm: Communicator, value: Any) -> Run:
    """Returns every rank's object to every rank, in a list."""
    data = pickled("value", value)
    return _exchange(comm, "all_gather", data, [len(data)] * comm.size)


def broadcast(comm: Communicator, value: Any, root: int) -> Run:
    """Returns the root's object to every rank: to the root the object itself."""
    is_root = comm.rank == root
    data = pickled("value", value) if is_root else b""
    sends = [len(data) * (j != comm.rank) for j in range(comm.size)]
    return _exchange(
        comm, "broadcast", data, sends, root=root, result=lambda arrived: value if is_root else arrived[root]
    )


def gather(comm: Communicator, value: Any, root: int) -> Run:
    """Returns every rank's object to the root, in a list, and None to the other ranks."""
    data = pickled("value", value)
    sends = [len(data) * (j == root) for j in range(comm.size)]
    return _exchange(
        comm, "gather", data, sends, root=root, result=lambda arrived: arrived if comm.rank == root else None
    )


def scatter(comm: Communicator, values: Sequence[Any] | None, root: int, name: str = "values") -> Run:
    """Returns one of the root's objects to each rank; on other ranks the argument ``name`` is not used."""
    parts = [b""] * comm.size
    if comm.rank == root:
        if values is None or len(values) != comm.size:
            raise InvalidParamError(
                f"{name} is {values!r}, expected {comm.size} objects on the root, one per rank", id=1148
            )
        parts = [pickled(f"{name}[{j}]", value) for j, value in enumerate(values)]
    sends = [len(part) for part in parts]
    return _exchange(comm, "scatter", b"".join(parts), sends, packed(sends), root, result=lambda arrived: arrived[root])


# By the operator that the ranks compare.
COLLECTIVES: dict[str, Callable[..., Run]] = {
    "all_gather": all_gather,
    "broadcast": broadcast,
    "gather": gather,
    "scatter": scatter,
}


def send(comm: Communicator, values: Sequence[Any], dst: int, tag: int = 0, timeout: float = -1.0) -> None:
    """Sends objects to one rank, which knows how many there are."""
    parts = [pickled(f"values[{j}]", value) for j, value in enumerate(values)]
    sizes = np.array([len(part) for part in parts], np.int64)
    for array in (sizes, np.frombuffer(b"".join(parts), np.uint8)):
        region = _core.buffer_address(array), array.nbytes
        post("send", comm, array.dtype.name, region, dst, tag, waits=True).run(timeout)


def recv(comm: Communicator, number: int, src: int | None, tag: int = 0, timeout: float = -1.0) -> list[Any]:
    """Receives ``number`` objects of one rank, or of the rank that sends first."""
    sizes = np.empty(number, np.int64)
    region = _core.buffer_address(sizes), sizes.nbytes
    source = post("recv", comm, "int64", region, src, tag, waits=True).run(timeout).source
    data = np.empty(sizes.sum(), np.uint8)
    region = _core.buffer_address(data), data.nbytes
    post("recv", comm, "uint8", region, source, tag, waits=True).run(timeout)
    return loads(data.data, sizes.tolist())


def pickled(name: str, value: Any) -> bytes:
    """Returns the object's bytes; raises InvalidParamError if it has none."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickle raises many classes
        raise InvalidParamError(
            f"{name} is a {type(value).__name__} that cannot be pickled ({error})", id=1149
        ) from error


def loads(data: memoryview, sizes: Sequence[int]) -> list[Any]:
    """Returns the objects whose bytes follow each other; no bytes stand for None."""
    parts = [data[begin : begin + n] for begin, n in zip(packed(sizes), sizes, strict=True)]
    return [pickle.loads(part) if len(part) else None for part in parts]
