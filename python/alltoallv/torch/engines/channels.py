"""How rows travel: through the engine that moves the data, or through the group's store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from alltoallv.torch.engines.agreement import ROW, Descriptor, Rows, note
from alltoallv.torch.engines.rendezvous import GroupStore, Wait


class Channel(Protocol):
    def rows(self, row: Rows, descriptor: Descriptor) -> tuple[Rows, list[int] | None]:
        """All ranks' rows, shape ``[W, ROW]``, and what every rank sends to this one, if the channel tells."""

    def gather(self, tag: str, data: bytes) -> list[bytes]:
        """Every rank's bytes, of one length, while the ranks are in one operator."""


class EngineChannel:
    """Each rank sends every other its row and what it will send it, in one step.

    Args:
        engine: A backend of torch.distributed for tensors in host memory.
        wait: Waits for a work of it.
    """

    def __init__(self, engine: Any, size: int, wait: Callable[[Any], None]) -> None:
        self._engine, self._size, self._wait = engine, size, wait

    def rows(self, row: Rows, descriptor: Descriptor) -> tuple[Rows, list[int]]:
        told = np.empty((self._size, ROW + 1), np.int64)
        told[:, :ROW] = row
        told[:, ROW] = descriptor.send_counts
        heard = np.empty_like(told)
        self._wait(self._engine.alltoall_base(torch.from_numpy(heard), torch.from_numpy(told), [], []))
        return heard[:, :ROW], heard[:, ROW].tolist()

    def gather(self, tag: str, data: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self._size)]
        self._wait(self._engine.allgather([parts], [mine]))
        return [part.numpy().tobytes() for part in parts]


class StoreChannel:
    """Every rank posts its row and reads those of all.

    Args:
        wait: Waits until what it is given says that it is ready.
    """

    def __init__(self, store: GroupStore, wait: Wait) -> None:
        self._store, self._wait = store, wait
        self._seq = 0

    def rows(self, row: Rows, descriptor: Descriptor) -> tuple[Rows, None]:
        self.announce(row, descriptor)
        rows = [np.frombuffer(told, np.int64) for told in self._store.collect(f"row/{self._seq}", self._wait)]
        return np.stack(rows), None

    def announce(self, row: Rows, descriptor: Descriptor) -> None:
        """Posts a row without waiting for the others'."""
        self._seq = int(row[0])
        if descriptor.failure is not None:
            self._post("note", note(descriptor))
        self._post("row", row.tobytes())

    def gather(self, tag: str, data: bytes) -> list[bytes]:
        self._post(tag, data)
        return self._store.collect(f"{tag}/{self._seq}", self._wait)

    def _post(self, tag: str, data: bytes) -> None:
        self._store.post(f"{tag}/{self._seq}/{self._store.rank}", data)
