"""Makes communicators over MPI, through mpi4py."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from alltoallv import _core
from alltoallv.errors import BackendUnavailableError, InvalidParamError

_TAG = 0x5A2A
_LARGEST = 1 << 30  # bytes of a message: MPI's counts have 32 bits
_STEP_SECONDS = 0.01

Piece = tuple[int, int, int]  # rank, address, bytes


class Engine:
    """Carries the data of a communicator between hosts; see op_host/runtime/core/mover.h."""

    name = "mpi"

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._requests: list[Any] = []
        self._ranks: list[int] = []

    def begin(self, out: Sequence[Piece], into: Sequence[Piece]) -> None:
        """Starts all messages, receives first."""
        self._requests, self._ranks = [], []
        for pieces, start in ((into, self._comm.Irecv), (out, self._comm.Isend)):
            for rank, address, count in pieces:
                for at in range(0, count, _LARGEST):
                    part = self._mpi.buffer.fromaddress(address + at, min(_LARGEST, count - at))
                    self._requests.append(start([part, self._mpi.BYTE], rank, _TAG))
                    self._ranks.append(rank)

    def progress(self) -> bool:
        """Waits for some milliseconds; returns True once all messages have been sent and received."""
        end = time.monotonic() + _STEP_SECONDS
        while not self._mpi.Request.Testall(self._requests):
            if time.monotonic() > end:
                return False
            time.sleep(0)
        self._requests = []
        return True

    def missing(self) -> list[int]:
        """Returns the ranks whose messages are under way."""
        ended = [self._mpi.Request.Get_status(request) for request in self._requests]
        return sorted({rank for rank, done in zip(self._ranks, ended, strict=False) if not done})

    def close(self) -> None:
        """Frees the duplicate, unless messages are left that will never end."""
        if not self._requests and not self._mpi.Is_finalized():
            self._comm.Free()


def connect(comm: Any, options: _core.CommunicatorOptions) -> _core.Communicator:
    """Returns what `alltoallv.Communicator.from_mpi` makes; ``options`` get rank, size and job."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise BackendUnavailableError(f"mpi4py is missing ({error}): pip install 'alltoallv[mpi]'", id=5033) from None
    if not isinstance(comm, MPI.Intracomm):
        raise InvalidParamError(f"comm is a {type(comm).__name__}, expected an mpi4py.MPI.Intracomm", id=1267)
    options.rank, options.size = comm.Get_rank(), comm.Get_size()
    options.job = "mpi:" + comm.bcast(secrets.token_hex(8), 0)
    if comm.allreduce(_core.this_place(), _same) is not None:
        return _core.communicator(options)
    return _core.engine_communicator(options, comm.allgather, Engine(MPI, comm.Dup()))


def _same(a: str | None, b: str | None) -> str | None:
    return a if a == b else None
