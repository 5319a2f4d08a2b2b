"""pyACL on emulated NPUs: the functions that programs call, as CANN's Python package has them.

A function returns ACL's code, after its results if it has any.
"""

from __future__ import annotations

import ctypes
from typing import Any

from alltoallv_emulator import pyacl

from . import rt, util

__all__ = ["finalize", "get_recent_err_msg", "get_soc_name", "init", "rt", "util"]

finalize = pyacl.function("aclFinalize")
__getattr__ = pyacl.missing("acl")


def init(config: str | None = None) -> int:
    """Calls aclInit; the file ``config`` changes nothing here."""
    code: int = pyacl.library().aclInit(None if config is None else config.encode())
    return code


def get_soc_name() -> str:
    """Returns the product's name."""
    return _text("aclrtGetSocName")


def get_recent_err_msg() -> str:
    """Returns the last message of this thread, which is then forgotten."""
    return _text("aclGetRecentErrMsg")


def _text(symbol: str) -> str:
    native: Any = getattr(pyacl.library(), symbol)
    native.restype = ctypes.c_char_p
    return str((native() or b"").decode())
