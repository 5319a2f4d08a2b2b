"""Element types that cross the front ends, by NumPy dtype."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv.errors import InvalidTensorError

_INI_MATCH = 13  # ATB's code for a dtype that the operator does not list


@lru_cache(maxsize=256)
def core_name(dtype: np.dtype[Any]) -> str:
    """The core's name of ``dtype``: NumPy's, or ml_dtypes' for bfloat16 and the float8 family.

    Raises:
        InvalidTensorError: a dtype without a fixed size known to the core, or of foreign byte order.
    """
    if not dtype.isnative:
        raise InvalidTensorError(f"dtype is {dtype.str}, expected this machine's byte order", _INI_MATCH)
    if dtype.name not in _core.dtypes:
        known = ", ".join(_core.dtypes)
        raise InvalidTensorError(f"dtype is {dtype.name}, expected one of {known}", _INI_MATCH)
    return dtype.name


def numpy_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """``numpy.dtype``, with ml_dtypes' names.

    Raises:
        InvalidTensorError: no such dtype, or one of ml_dtypes, which is not installed.
    """
    try:
        if isinstance(dtype, str) and dtype.startswith(("bfloat", "float8")):
            import ml_dtypes

            dtype = getattr(ml_dtypes, dtype)
        return np.dtype(dtype)
    except (ImportError, AttributeError, TypeError) as error:
        raise InvalidTensorError(f"dtype is {dtype!r}, which is none here ({error})", _INI_MATCH) from error
