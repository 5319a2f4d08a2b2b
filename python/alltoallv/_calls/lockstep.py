"""Keeps the ranks in step in a call of several operators, some of which are under way at once."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.counts import packed
from alltoallv.communicator import Communicator
from alltoallv.errors import AllToAllVError, PeerMismatchError


class lockstep:
    """Surrounds a call in ``parts``, as many on all ranks, or raises PeerMismatchError before the first.

    When a part fails, some ranks have already begun later ones, which others never reach. So every rank waits until all
    have seen the failure; what they still had under way also fails. Then their next calls meet. A call of one part, and
    one over a device's engine, needs nothing of that.
    """

    def __init__(self, communicator: Any, parts: int) -> None:
        member = isinstance(communicator, Communicator) and communicator.host_core is not None
        self._communicator: Communicator | None = communicator if member and parts > 1 else None
        self._parts = parts

    def __enter__(self) -> None:
        if (comm := self._communicator) is None:
            return
        every = _gathered(comm, self._parts)
        for rank, parts in enumerate(every.tolist()):  # without a check nobody has compared them
            if every[0] != parts:
                raise PeerMismatchError(
                    f"rank 0 begins a call in {every[0]} chunks, rank {rank} begins a call in {parts} chunks", id=3027
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        comm = self._communicator
        while comm is not None and isinstance(error, Exception) and comm.usable:
            try:
                if not _gathered(comm, 0).any():
                    return
            except AllToAllVError:  # it met what a peer still had under way
                continue


def _gathered(comm: Communicator, number: int) -> npt.NDArray[np.int64]:
    """Returns the numbers of all ranks. As bytes, so that it meets no exchange of counts."""
    own_number, size = np.array([number], np.int64), [8] * comm.size
    every = np.empty(comm.size, np.int64)
    plan = _core.Plan(comm.core, "exchange_counts", "uint8", size, [0] * comm.size, size, packed(size), terms=number)
    plan.run(own_number.ctypes.data, every.ctypes.data)
    return every
