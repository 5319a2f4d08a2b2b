"""Passes the output of ranks on with a prefix that says whose it is: whole lines, and on a terminal also the rest."""

from __future__ import annotations

import os
import re
from typing import IO, TextIO

LINE_LIMIT = 1 << 20  # bytes after which a line without an end is passed on in pieces
LINGER_SECONDS = 0.05  # after which a terminal shows one
_CHUNK = 1 << 16
_COLOURS = (36, 33, 32, 35, 34, 31)
_PIECES = re.compile(rb"\r?\n|\r|[^\r\n]+")


class OutputClosed(Exception):
    """Nobody reads our output any more."""


def prefix(rank: int, target: TextIO) -> bytes:
    """``[rank] ``, coloured on a terminal unless NO_COLOR is set."""
    text = f"[{rank}] "
    if target.isatty() and "NO_COLOR" not in os.environ:
        text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
    return text.encode()


class Screen:
    """Where the ranks' output goes, and whose line has no end there yet."""

    def __init__(self, target: TextIO) -> None:
        self.is_terminal = target.isatty()
        self.open: Stream | None = None
        self._file = target.buffer

    def write(self, data: bytes) -> None:
        """Raises OutputClosed where nobody reads."""
        try:
            self._file.write(data)
            self._file.flush()
        except BrokenPipeError:
            # Python would report the same again when it flushes at exit.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._file.fileno())
            os.close(null)
            raise OutputClosed from None

    def end_line(self) -> None:
        """Leaves the cursor at the start of a line."""
        if self.open is not None:
            self.write(b"\n")


class Stream:
    """One output pipe of a rank. Bytes pass as they are, UTF-8 or not; all of them go to ``log`` at once."""

    def __init__(self, source: IO[bytes], screen: Screen, prefix: bytes = b"", log: IO[bytes] | None = None) -> None:
        os.set_blocking(source.fileno(), False)
        self.source = source
        self._screen = screen
        self._prefix = prefix
        self._log = log
        self._pending = bytearray()
        self._at_start = True  # of a line
        self._redrawn = False  # the line begins where another has been, as a progress bar does

    @property
    def lingers(self) -> bool:
        """Whether a terminal should soon show a line without an end: a prompt, a progress bar."""
        return self._screen.is_terminal and bool(self._pending)

    def pump(self) -> bool:
        """Passes on the whole lines that are there; at the pipe's end the partial one too, and returns False.

        Raises:
            OutputClosed: the target has no reader.
        """
        while True:
            data = self.source.read(_CHUNK)
            if data and self._log:
                self._log.write(data)
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
        if self._screen.is_terminal:
            data = self._make_room() + self._marked(data)
        elif self._prefix:
            lines = data.split(b"\n")
            if not lines[-1]:
                lines.pop()
            data = b"".join(self._prefix + line + b"\n" for line in lines)
        self._screen.write(data)

    def _make_room(self) -> bytes:
        """Ends another rank's line; one that is redrawn gives way instead, and comes again."""
        other = self._screen.open
        if other is None or other is self:
            return b""
        other._at_start = True
        return b"\r\x1b[K" if other._redrawn else b"\n"

    def _marked(self, data: bytes) -> bytes:
        """With the prefix wherever the cursor is at the start of a line."""
        marked = bytearray()
        for piece in _PIECES.findall(data):
            if piece == b"\r":
                self._at_start = self._redrawn = True
                marked += piece
                continue
            if self._at_start:
                marked += self._prefix + (b"\x1b[K" if self._redrawn else b"")
            marked += piece
            self._at_start = piece.endswith(b"\n")
            self._redrawn &= not self._at_start
        self._screen.open = None if self._at_start and not self._redrawn else self
        return bytes(marked)
