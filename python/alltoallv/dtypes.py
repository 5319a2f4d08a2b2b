"""Names the element types that cross the front ends, by NumPy dtype."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv.errors import InvalidTensorError

_INI_MATCH = 13  # ATB's code for a dtype that the operator does not list


@lru_cache(maxsize=256)
def core_name(dtype: np.dtype[Any]) -> str:
    """Returns the core's name of ``dtype``: NumPy's, or ml_dtypes' for bfloat16 and the float8 family.

    Any other dtype of fixed size only moves: records, times, texts of fixed length, long doubles, numbers of foreign
    byte order. Its name has the bytes of an element and a digest of NumPy's description of it, by which ranks find that
    theirs differ.

    Raises:
        InvalidTensorError: a dtype that holds references, or whose elements have no bytes or more than 65535.
    """
    if dtype.isnative and dtype.name in _core.dtypes:
        return dtype.name
    if dtype.hasobject or not 0 < dtype.itemsize < 2**16:
        raise InvalidTensorError(
            f"dtype is {dtype}, expected one whose elements have 1 to 65535 bytes and hold no references",
            _INI_MATCH,
            id=2074,
        )
    return f"{dtype.itemsize} bytes #{zlib.crc32(repr(dtype).encode()) & 0xFFFF:04x}"


def item_size(name: str) -> int:
    """Returns the bytes of an element of the dtype with this core's name."""
    info = _core.dtypes.get(name)
    return info.size if info else int(name.split()[0])


def numpy_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Returns ``numpy.dtype(name)``, where the name may also be one of ml_dtypes'; raises if there is none here."""
    try:
        if isinstance(dtype, str) and dtype.startswith(("bfloat", "float8")):
            import ml_dtypes

            dtype = getattr(ml_dtypes, dtype)
        return np.dtype(dtype)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # also of text that is not UTF-8
        raise InvalidTensorError(
            f"dtype is {dtype!r}, which is not a dtype here ({error})", _INI_MATCH, id=2075
        ) from error
