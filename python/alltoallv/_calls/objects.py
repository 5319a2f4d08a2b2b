"""Picklable objects travel between ranks as bytes of any length, which the receivers do not know before.

To unpickle runs what the bytes say: the ranks of a communicator are processes of one user, which trust each other.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from alltoallv import _core, memory
from alltoallv._calls import messages
from alltoallv._calls.counts import packed
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError

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
        messages.post("send", comm, array.dtype.name, region, dst, tag, waits=True).run(timeout)


def recv(comm: Communicator, number: int, src: int | None, tag: int = 0, timeout: float = -1.0) -> list[Any]:
    """Receives ``number`` objects of one rank, or of the rank that sends first."""
    sizes = np.empty(number, np.int64)
    region = _core.buffer_address(sizes), sizes.nbytes
    source = messages.post("recv", comm, "int64", region, src, tag, waits=True).run(timeout).source
    data = np.empty(sizes.sum(), np.uint8)
    region = _core.buffer_address(data), data.nbytes
    messages.post("recv", comm, "uint8", region, source, tag, waits=True).run(timeout)
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
