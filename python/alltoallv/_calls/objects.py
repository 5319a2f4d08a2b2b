"""Bytes of any length between ranks, which the receivers do not know before: what pickled objects travel as."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alltoallv import _core, memory
from alltoallv._calls.counts import packed
from alltoallv.communicator import Communicator


class ByteExchange:
    """Ready to run. ``sends[j]`` bytes from ``sdispls[j]`` of ``data`` on go to rank j. To be made under the guard."""

    def __init__(
        self,
        comm: Communicator,
        operator: str,
        data: bytes,
        sends: Sequence[int],
        sdispls: Sequence[int] | None = None,
        root: int = 0,
    ) -> None:
        begins = [0] * comm.size if sdispls is None else sdispls
        self._plan = _core.Plan(comm.core, operator, "uint8", sends, begins, [], [], root)
        self._data = np.frombuffer(data, np.uint8)

    def run(self, timeout: float = -1.0) -> list[memoryview]:
        """What the ranks have sent, by rank; within seconds, below 0 the communicator's."""
        block, told = self._plan.run_learning(_core.buffer_address(self._data), timeout)
        return split(memory.from_block(block, (sum(told),), np.dtype(np.uint8)).data, told)


def split(data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Parts that follow each other."""
    return [data[begin : begin + n] for begin, n in zip(packed(sizes), sizes, strict=True)]
