"""The part of mpi4py's MPI that its test_cco_vec uses, on the functions of alltoallv.numpy."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import alltoallv.numpy as an
from alltoallv import Communicator

Array = npt.NDArray[Any]
IN_PLACE: Any = object()
BOTTOM: Any = object()
_numbers = itertools.count()


class Datatype:
    """A type of elements, or bytes at an address."""

    def __init__(self, code: str = "", address: int = 0, nbytes: int = 0) -> None:
        self.code, self.address = code, address
        self.extent = nbytes or (np.dtype(code).itemsize if code else 0)

    @staticmethod
    def Create_struct(counts: Sequence[int], addresses: Sequence[int], types: Sequence[Datatype]) -> Datatype:
        (count,), (address,), (kind,) = counts, addresses, types
        return Datatype("B", address, count * kind.extent)

    def Commit(self) -> Datatype:
        return self

    def Free(self) -> None:
        """Nothing is held."""


DATATYPE_NULL = Datatype()
SIGNED_CHAR, SHORT, INT, LONG, LONG_LONG = map(Datatype, "bhilq")
UNSIGNED_CHAR, UNSIGNED_SHORT, UNSIGNED_INT, UNSIGNED_LONG, UNSIGNED_LONG_LONG = map(Datatype, "BHILQ")
FLOAT, DOUBLE, LONG_DOUBLE, C_BOOL = map(Datatype, "fdg?")
C_FLOAT_COMPLEX, C_DOUBLE_COMPLEX, C_LONG_DOUBLE_COMPLEX = map(Datatype, "FDG")


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    return "alltoallv", (1, 0, 0)


def Get_address(raw: Any) -> int:
    return int(_array(raw).ctypes.data)


class Comm:
    """One communicator with MPI's names."""

    def __init__(self, comm: Communicator | None) -> None:
        self.comm: Any = comm

    def Get_size(self) -> int:
        return int(self.comm.size)

    def Get_rank(self) -> int:
        return int(self.comm.rank)

    def Dup(self) -> Comm:
        domain = f"dup-{next(_numbers)}"
        return Comm(Communicator.threads(1)[0] if self is COMM_SELF else Communicator.from_env(domain=domain))

    def Free(self) -> None:
        self.comm.destroy()

    def Barrier(self) -> None:
        an.barrier(group=self.comm)

    def Gatherv(self, send: Any, receive: Any, root: int = 0) -> None:
        x = _flat(send)
        if self.comm.rank != root:
            an.gather(x, root, group=self.comm)
            return
        out, counts, displs = self._vector(receive)
        parts = an.gather(x, root, counts, group=self.comm)
        for part, place in zip(_split(parts, counts), displs, strict=True):
            out[place : place + len(part)] = part

    def Scatterv(self, send: Any, receive: Any, root: int = 0) -> None:
        out = _flat(receive)
        if self.comm.rank != root:
            an.scatter(out, root=root, group=self.comm)
            return
        x, counts, displs = self._vector(send)
        parts = np.concatenate([x[place : place + n] for place, n in zip(displs, counts, strict=True)])
        an.scatter(out, parts, root, counts, group=self.comm)

    def Allgatherv(self, send: Any, receive: Any) -> None:
        out, counts, displs = self._vector(receive)
        if send is IN_PLACE:
            begin = displs[self.comm.rank]
            x = out[begin : begin + counts[self.comm.rank]].copy()
        else:
            x = _flat(send)
        sends = [len(x)] * self.comm.size
        an.all_to_all_v(x, sends, counts, sdispls=[0] * self.comm.size, rdispls=displs, out=out, group=self.comm)

    def Alltoallv(self, send: Any, receive: Any) -> None:
        out, recvs, rdispls = self._vector(receive)
        x, sends, sdispls = (out.copy(), recvs, rdispls) if send is IN_PLACE else self._vector(send)
        an.all_to_all_v(x, sends, recvs, sdispls=sdispls, rdispls=rdispls, out=out, group=self.comm)

    def Alltoallw(self, send: Any, receive: Any) -> None:
        out, recvs, rdispls = _bytes(receive)
        x, sends, sdispls = (out.copy(), recvs, rdispls) if send is IN_PLACE else _bytes(send)
        an.all_to_all_v(x, sends, recvs, sdispls=sdispls, rdispls=rdispls, out=out, group=self.comm)

    def _vector(self, message: Any) -> tuple[Array, list[int], list[int]]:
        """A message of parts for all ranks: its array, their counts, and where they begin."""
        size = self.comm.size
        raw, *layout = message if isinstance(message, list | tuple) else (message,)
        x = _array(raw).reshape(-1)
        given = layout[0] if layout and not isinstance(layout[0], Datatype) else len(x) // size
        counts, displs = given if isinstance(given, tuple) else (given, None)
        counts = list(counts) if isinstance(counts, list) else [counts] * size
        if displs is None:
            displs = [sum(counts[:j]) for j in range(size)]
        return x, counts, list(displs) if isinstance(displs, list) else [displs * j for j in range(size)]


def _array(raw: Any) -> Array:
    """The memory of what mpi4py's tests call an array, behind DLPack or a device's interface too."""
    return np.asarray(getattr(raw, "array", raw))


def _flat(message: Any) -> Array:
    """A message of one part."""
    raw, *layout = message if isinstance(message, list | tuple) else (message,)
    x = _array(raw).reshape(-1)
    return x[: layout[0]] if layout and isinstance(layout[0], int) else x


def _split(parts: Array, counts: Sequence[int]) -> list[Array]:
    return np.split(parts, np.cumsum(counts)[:-1])


def _bytes(message: Any) -> tuple[Array, list[int], list[int]]:
    """A message with a type and a place in bytes for every rank."""
    raw, *places, types = message
    counts, displs = places[0] if len(places) == 1 else places
    sizes = [count * kind.extent for count, kind in zip(counts, types, strict=True)]
    if raw is not BOTTOM:
        return _array(raw).reshape(-1).view(np.uint8), sizes, list(displs)
    begins = [kind.address for kind in types]
    low = min(begins)
    high = max(begin + size for begin, size in zip(begins, sizes, strict=True))
    memory = (ctypes.c_uint8 * (high - low)).from_address(low)
    return np.frombuffer(memory, np.uint8), sizes, [begin - low for begin in begins]


COMM_NULL = Comm(None)
COMM_SELF = Comm(Communicator.threads(1)[0])
COMM_WORLD = Comm(Communicator.from_env())
