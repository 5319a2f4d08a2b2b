"""Puts functions in the place of a framework's own, and takes them out again: what every `install` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


class Replacements:
    """What has been replaced in a package, in order.

    Args:
        package: The framework's name.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._replaced: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def replace(self, owner: Any, name: str, ours: Any) -> None:
        """Replaces an attribute of a module or a class."""
        self._replaced.append((owner, name, vars(owner)[name] if name in vars(owner) else getattr(owner, name)))
        setattr(owner, name, ours)

    def everywhere(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Replaces objects, given with ours, in all modules of the package that are imported."""
        ours = {id(theirs): each for theirs, each in pairs}
        for module in [each for name, each in sys.modules.items() if name.partition(".")[0] == self._package]:
            for name, value in list(vars(module).items()):
                if id(value) in ours:
                    self.replace(module, name, ours[id(value)])

    def undo(self) -> None:
        """Puts all back; does nothing if nothing is replaced."""
        while self._replaced:
            owner, name, theirs = self._replaced.pop()
            setattr(owner, name, theirs)
