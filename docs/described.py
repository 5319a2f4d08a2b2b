"""For mkdocstrings: docstrings and functions that exist only when the program runs.

A function that `described` decorates has the docstring of the one that is named there. A name that a front end takes
from its object is a function, which that object's class makes when it is created.
"""

from __future__ import annotations

from typing import Any

import griffe

MAKERS = "alltoallv._calls.exchanges.Exchanges.__init__", "alltoallv.quantization.functions.Quantized.__init__"


class Described(griffe.Extension):
    """Copies docstrings, as the decorator does when the program runs."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        modules = loader.modules_collection
        self._decorated(pkg, modules)
        made = {name: function for path in MAKERS for name, function in modules[path].members.items()}
        self._assigned(pkg, made)

    def _decorated(self, parent: griffe.Object, modules: griffe.ModulesCollection) -> None:
        for member in parent.members.values():
            if isinstance(member, griffe.Module | griffe.Class):
                self._decorated(member, modules)
            elif isinstance(member, griffe.Function):
                self._decorated(member, modules)
                for decorator in member.decorators:
                    call = decorator.value
                    if isinstance(call, griffe.ExprCall) and call.canonical_path.endswith(".described"):
                        _copy_docstring(modules[call.arguments[0].canonical_path], member)

    def _assigned(self, module: griffe.Module, made: dict[str, Any]) -> None:
        for name, member in list(module.members.items()):
            if isinstance(member, griffe.Module):
                self._assigned(member, made)
            elif isinstance(member, griffe.Attribute) and name in made and f".{name}" in str(member.value):
                given = made[name].parameters
                untyped = [griffe.Parameter(one.name, kind=one.kind, default=one.default) for one in given]
                lines: Any = {"lineno": member.lineno, "endlineno": member.endlineno}
                function = griffe.Function(name, parameters=griffe.Parameters(*untyped), **lines)
                _copy_docstring(made[name], function)
                module.set_member(name, function)


def _copy_docstring(source: Any, target: griffe.Function) -> None:
    text = source.docstring
    target.docstring = griffe.Docstring(
        text.value, parent=target, parser=text.parser, parser_options=text.parser_options
    )
