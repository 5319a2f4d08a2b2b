"""For mkdocstrings: a function that `described` decorates has the docstring of the one that is named there."""

from __future__ import annotations

from typing import Any

import griffe


class Described(griffe.Extension):
    """Copies docstrings, as the decorator does when the program runs."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        self._visit(pkg, loader)

    def _visit(self, module: griffe.Module | griffe.Class, loader: griffe.GriffeLoader) -> None:
        for member in module.members.values():
            if isinstance(member, griffe.Module | griffe.Class):
                self._visit(member, loader)
            elif isinstance(member, griffe.Function):
                for decorator in member.decorators:
                    call = decorator.value
                    if isinstance(call, griffe.ExprCall) and call.canonical_path.endswith(".described"):
                        member.docstring = loader.modules_collection[call.arguments[0].canonical_path].docstring
