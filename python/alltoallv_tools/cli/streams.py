"""Passes the output of ranks on, whole lines at a time, with a prefix that says whose they are."""

from __future__ import annotations

import os
from typing import IO, TextIO

LINE_LIMIT = 1 << 20  # bytes after which a line without an end is passed on in pieces
_CHUNK = 1 << 16
_COLOURS = (36, 33, 32, 35, 34, 31)


class OutputClosed(Exception):
    """Nobody reads our output any more."""


def prefix(rank: int, target: TextIO) -> bytes:
    """``[rank] ``, coloured on a terminal unless NO_COLOR is set."""
    text = f"[{rank}] "
    if target.isatty() and "NO_COLOR" not in os.environ:
        text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
    return text.encode()


class Stream:
    """One output pipe of a rank. Bytes pass as they are, UTF-8 or not."""

    def __init__(self, source: IO[bytes], target: IO[bytes], prefix: bytes = b"") -> None:
        os.set_blocking(source.fileno(), False)
        self.source = source
        self._target = target
        self._prefix = prefix
        self._pending = bytearray()

    def pump(self) -> bool:
        """Passes on the whole lines that are there; at the pipe's end the partial one too, and returns False.

        Raises:
            OutputClosed: the target has no reader.
        """
        while True:
            data = self.source.read(_CHUNK)
            if data == b"":
                self.flush()
                return False
            self._pending += data or b""
            if data is None or len(data) < _CHUNK:
                break
        cut = self._pending.rfind(b"\n") + 1
        if cut == 0 and len(self._pending) >= LINE_LIMIT:
            cut = len(self._pending)
        self._pass_on(cut)
        return True

    def flush(self) -> None:
        """Passes on a line without an end."""
        self._pass_on(len(self._pending))

    def _pass_on(self, length: int) -> None:
        if length == 0:
            return
        data = bytes(self._pending[:length])
        del self._pending[:length]
        if self._prefix:
            lines = data.split(b"\n")
            if not lines[-1]:
                lines.pop()
            data = b"".join(self._prefix + line + b"\n" for line in lines)
        try:
            self._target.write(data)
            self._target.flush()
        except BrokenPipeError:
            # Python would report the same again when it flushes at exit.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._target.fileno())
            os.close(null)
            raise OutputClosed from None
