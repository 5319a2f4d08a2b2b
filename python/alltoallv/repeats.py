"""Calls that repeat: what the checks of an earlier call have shown is not looked at again."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import Any


class Repeats:
    """What a front end has made ready for the latest calls of one communicator.

    The key of a call holds all that its checks depend on, except where the data lie.
    """

    __slots__ = ("calls",)
    limit = 256  # calls; programs whose counts change with every batch repeat none

    def __init__(self) -> None:
        # Looked into from the extension as well, which so saves a call: `_core.run_again`.
        self.calls: dict[Hashable, Any] = {}

    def find(self, key: Hashable) -> Any:
        """What `keep` was given with an equal key, or None."""
        try:
            return self.calls.get(key)
        except TypeError:  # counts that are no integers: for the checks to refuse
            return None

    def keep(self, key: Hashable, ready: Any) -> None:
        """To be called once the checks have passed."""
        if len(self.calls) >= self.limit:
            self.calls.clear()
        with contextlib.suppress(TypeError):
            self.calls[key] = ready
