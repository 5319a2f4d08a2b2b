"""Rows of experts in small pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from alltoallv import _core


@contextlib.contextmanager
def pieces_of(back: int | None = None, there: int | None = None) -> Iterator[None]:
    """Lets this process send pieces of that many bytes back from experts, and behind headers to them."""
    before = _core.moe_pieces(back, there)
    try:
        yield
    finally:
        _core.moe_pieces(*before)
