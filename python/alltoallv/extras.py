"""Imports packages that an installation may lack; the error explains how to install them."""

from __future__ import annotations

import importlib
from typing import Any


def extra(module: str, name: str) -> Any:
    """Imports and returns a module of the extra ``name``, which is also the part of alltoallv that needs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        message = f"alltoallv.{name} needs {module}: pip install 'alltoallv[{name}]'"
        raise ModuleNotFoundError(message, name=module) from None
