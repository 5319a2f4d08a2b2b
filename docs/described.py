"""For mkdocstrings: docstrings that a function gets when the program runs.

A function that `described` decorates has the docstring of the one that is named there; a front end's name for a method
has that of the method.
"""

from __future__ import annotations

from typing import Any

import griffe

METHODS_OF = (
    "alltoallv._calls.exchanges.Exchanges",
    "alltoallv._calls.expert_rows.ExpertRows",
    "alltoallv.quantization.functions.Quantized",
)


class Described(griffe.Extension):
    """Copies docstrings, as the decorator does when the program runs."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        modules = loader.modules_collection
        self._decorated(pkg, modules)
        methods = {name: method for path in METHODS_OF for name, method in modules[path].members.items()}
        self._assigned(pkg, methods)

    def _decorated(self, parent: griffe.Module | griffe.Class, modules: griffe.ModulesCollection) -> None:
        for member in parent.members.values():
            if isinstance(member, griffe.Module | griffe.Class):
                self._decorated(member, modules)
            elif isinstance(member, griffe.Function):
                for decorator in member.decorators:
                    call = decorator.value
                    if isinstance(call, griffe.ExprCall) and call.canonical_path.endswith(".described"):
                        member.docstring = modules[call.arguments[0].canonical_path].docstring

    def _assigned(self, module: griffe.Module, methods: dict[str, Any]) -> None:
        for name, member in list(module.members.items()):
            if isinstance(member, griffe.Module):
                self._assigned(member, methods)
            elif isinstance(member, griffe.Attribute) and name in methods and f".{name}" in str(member.value):
                member.docstring = methods[name].docstring
