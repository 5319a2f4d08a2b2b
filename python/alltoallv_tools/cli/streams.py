"""Passes the output of ranks on, with the rank as prefix: whole lines, and on a terminal also unfinished ones."""

from __future__ import annotations

import os
import re
from typing import IO, TextIO

LINE_LIMIT = 1 << 20  # bytes; longer lines are passed on in pieces
LINGER_SECONDS = 0.05  # after this time a terminal shows an unfinished line
_CHUNK = 1 << 16
_COLOURS = (36, 33, 32, 35, 34, 31)
_WITHOUT_CANN = b"Failed to load the backend extension: torch_npu"  # torch's own words
_PIECES = re.compile(rb"\r?\n|\r|[^\r\n]+")


class OutputClosed(Exception):
    """Nobody reads our output any more."""


def prefix(rank: int, target: TextIO) -> bytes:
    """Returns ``[rank] ``, coloured on a terminal unless NO_COLOR is set."""
    text = f"[{rank}] "
    if target.isatty() and "NO_COLOR" not in os.environ:
        text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
    return text.encode()


class Screen:
    """The target of the ranks' output; it knows which rank's line is unfinished there.

    Attributes:
        lacks_cann: A rank has said that torch could not load torch_npu.
    """

    def __init__(self, target: TextIO) -> None:
        self.is_terminal = target.isatty()
        self.lacks_cann = False
        self.open: Stream | None = None
        self._file = target.buffer

    def write(self, data: bytes) -> None:
        """Writes ``data``; raises OutputClosed if nobody reads it."""
        try:
            self._file.write(data)
            self._file.flush()
        except BrokenPipeError:
            # Python would report the error again when it flushes at exit.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._file.fileno())
            os.close(null)
            raise OutputClosed from None

    def end_line(self) -> None:
        """Ends an unfinished line."""
        if self.open is not None:
            self.write(b"\n")


class Stream:
    """One output pipe of a rank. Bytes pass unchanged, UTF-8 or not; all of them go to ``log`` at once."""

    def __init__(self, source: IO[bytes], screen: Screen, prefix: bytes = b"", log: IO[bytes] | None = None) -> None:
        os.set_blocking(source.fileno(), False)
        self.source = source
        self._screen = screen
        self._prefix = prefix
        self._log = log
        self._pending = bytearray()
        self._at_start = True  # the next byte begins a line
        self._redrawn = False  # the line overwrites another one, as a progress bar does

    @property
    def lingers(self) -> bool:
        """True if a terminal should soon show an unfinished line: a prompt, a progress bar."""
        return self._screen.is_terminal and bool(self._pending)

    def pump(self) -> bool:
        """Passes on the whole lines that have arrived; at the pipe's end also the unfinished one, and returns False.

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
        """Passes on an unfinished line."""
        self._pass_on(len(self._pending))

    def _pass_on(self, length: int) -> None:
        if length == 0:
            return
        data = bytes(self._pending[:length])
        self._screen.lacks_cann |= _WITHOUT_CANN in data
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
        """Ends another rank's unfinished line; a line that is redrawn is erased instead, and will be drawn again."""
        other = self._screen.open
        if other is None or other is self:
            return b""
        other._at_start = True
        return b"\r\x1b[K" if other._redrawn else b"\n"

    def _marked(self, data: bytes) -> bytes:
        """Returns ``data`` with the prefix wherever a line begins."""
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
