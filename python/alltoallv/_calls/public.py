"""How the functions of a front end look from outside: to help(), inspect.signature and pickle."""

from __future__ import annotations

import re
from types import FunctionType
from typing import Any


def publish(package: dict[str, Any], **types: str) -> None:
    """Gives the functions that a package offers its name as their module, and signatures in its framework's types.

    dir() and with it tab completion then show what the package offers, and not the modules inside it.

    Args:
        package: The package's ``globals()``, with ``__all__``.
        types: What signatures show for the type variables ``A`` (tensors), ``G`` (groups) and ``H`` (handles).
    """
    package["__dir__"] = lambda: [*package["__all__"], *(name for name in package if name.startswith("__"))]
    for name in package["__all__"]:
        function = package[name]
        if isinstance(function, FunctionType):
            function.__module__, function.__qualname__ = package["__name__"], name
            for variable, shown in types.items():
                for argument, type in function.__annotations__.items():
                    function.__annotations__[argument] = re.sub(rf"\b{variable}\b", shown, type)
