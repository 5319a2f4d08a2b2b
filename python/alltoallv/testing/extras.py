"""What `alltoallv.testing` needs beside the library, which an installation may lack."""

from __future__ import annotations

import importlib
from typing import Any


def extra(module: str) -> Any:
    """An imported module of the extra ``testing``.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(
            f"alltoallv.testing needs {module}: pip install 'alltoallv[testing]'", name=module
        ) from None
