"""Makes communicators of ranks whose hosts share a folder: files carry what goes between hosts."""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from alltoallv import _core
from alltoallv.errors import CommTimeoutError

_STEP_SECONDS = 0.01

Piece = tuple[int, int, int]  # rank, address, bytes


class Engine:
    """Carries the data of a communicator between hosts; see op_host/runtime/core/mover.h.

    A rank writes a file for each piece that it sends, and removes those that it has read.
    """

    name = "folder"

    def __init__(self, folder: Path, options: _core.CommunicatorOptions) -> None:
        self._folder, self._options = folder, options
        self._transfers = self._gathers = 0
        self._into: list[Piece] = []

    def gather(self, own: bytes) -> list[bytes]:
        """Gives every rank the bytes of all ranks."""
        rank, size = self._options.rank, self._options.size
        self._gathers += 1
        self._write(f"card-{self._gathers}-{rank}", own)
        cards: dict[int, bytes] = {}
        end = time.monotonic() + self._options.timeout
        while absent := [j for j in range(size) if j not in cards]:
            if time.monotonic() > end:
                where, ranks = f"domain '{self._options.domain}'", ", ".join(map(str, absent))
                raise CommTimeoutError(
                    f"{where}: these ranks did not come in {self._options.timeout} s: {ranks}", id=4041
                )
            for j in absent:
                if (path := self._folder / f"card-{self._gathers}-{j}").exists():
                    cards[j] = path.read_bytes()
            time.sleep(0.001)
        # Who has come here has read all cards before these.
        (self._folder / f"card-{self._gathers - 1}-{rank}").unlink(missing_ok=True)
        return [cards[j] for j in range(size)]

    def begin(self, out: Sequence[Piece], into: Sequence[Piece]) -> None:
        """Writes all pieces."""
        self._transfers += 1
        self._into = list(into)
        for rank, address, count in out:
            self._write(self._piece(self._options.rank, rank), (ctypes.c_char * count).from_address(address))

    def progress(self) -> bool:
        """Reads the pieces that have come; returns True once all have."""
        end = time.monotonic() + _STEP_SECONDS
        while True:
            self._into = [piece for piece in self._into if not self._read(*piece)]
            if not self._into or time.monotonic() > end:
                return not self._into
            time.sleep(0.0005)

    def missing(self) -> list[int]:
        """Returns the ranks whose pieces have not come."""
        return [rank for rank, _, _ in self._into]

    def close(self) -> None:
        """Removes this rank's last card; what a failed transfer has left stays."""
        (self._folder / f"card-{self._gathers}-{self._options.rank}").unlink(missing_ok=True)

    def _piece(self, source: int, target: int) -> str:
        return f"piece-{self._transfers}-{source}-{target}"

    def _write(self, name: str, data: bytes | ctypes.Array[ctypes.c_char]) -> None:
        part = self._folder / f"{name}.part"
        part.write_bytes(data)
        part.rename(self._folder / name)  # a reader finds all of it or nothing

    def _read(self, rank: int, address: int, count: int) -> bool:
        path = self._folder / self._piece(rank, self._options.rank)
        if not path.exists():
            return False
        with path.open("rb") as file:
            file.readinto((ctypes.c_char * count).from_address(address))
        path.unlink()
        return True


def connect(folder: Path, options: _core.CommunicatorOptions) -> _core.Communicator:
    """Returns what `alltoallv.Communicator.from_folder` makes; ``options`` get a job."""
    engine = Engine(folder, options)
    options.job = "folder:" + engine.gather(secrets.token_hex(8).encode())[0].decode()
    if len(set(engine.gather(_core.this_place().encode()))) == 1:
        return _core.communicator(options)
    return _core.engine_communicator(options, engine.gather, engine)
