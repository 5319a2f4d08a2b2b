"""For mkdocstrings: docstrings that a function gets when the program runs.

A function that `described` decorates has the docstring of the one that is named there; a name that a front
end takes from its object has the docstring of that name.
"""

from __future__ import annotations

from typing import Any

import griffe

DESCRIBED_IN = "alltoallv._calls.signature", "alltoallv.quantization.signature"


class Described(griffe.Extension):
    """Copies docstrings, as the decorator does when the program runs."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        modules = loader.modules_collection
        self._decorated(pkg, modules)
        described = {name: member for path in DESCRIBED_IN for name, member in modules[path].members.items()}
        self._assigned(pkg, described)

    def _decorated(self, parent: griffe.Module | griffe.Class, modules: griffe.ModulesCollection) -> None:
        for member in parent.members.values():
            if isinstance(member, griffe.Module | griffe.Class):
                self._decorated(member, modules)
            elif isinstance(member, griffe.Function):
                for decorator in member.decorators:
                    call = decorator.value
                    if isinstance(call, griffe.ExprCall) and call.canonical_path.endswith(".described"):
                        member.docstring = modules[call.arguments[0].canonical_path].docstring

    def _assigned(self, module: griffe.Module, described: dict[str, Any]) -> None:
        for name, member in list(module.members.items()):
            if isinstance(member, griffe.Module):
                self._assigned(member, described)
            elif isinstance(member, griffe.Attribute) and name in described and f".{name}" in str(member.value):
                member.docstring = described[name].docstring
