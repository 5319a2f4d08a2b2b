"""Calls whose checks have passed before: only the arrays are looked at again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from alltoallv import _core
from alltoallv.errors import AllToAllVError
from alltoallv.numpy.arrays import Array


class Ready:
    """A checked call without gaps, for arrays that need no conversion."""

    __slots__ = ("_dtype", "_nbytes", "_run", "_shape")

    def __init__(self, call: _core.ArrayCall, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """``shape`` and ``dtype`` are the output's."""
        self._shape, self._dtype, self._nbytes = shape, dtype, math.prod(shape) * dtype.itemsize
        self._run = call.run

    def __call__(self, input: object, out: Array | None) -> Array | None:
        """Runs it, and returns the output; None if these are no such arrays, with nothing done."""
        if out is None:
            try:
                out = np.ndarray(self._shape, self._dtype, _core.allocate(self._nbytes))  # type: ignore[arg-type]
            except AllToAllVError:  # for the guard to see
                return None
        return out if self._run(input, out) else None


def ready_exchange(plan: _core.Plan, input_size: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Ready:
    """An exchange of at least ``input_size`` elements."""
    nbytes = math.prod(shape) * dtype.itemsize
    return Ready(plan.on_arrays(np.ndarray, dtype.char, input_size * dtype.itemsize, nbytes), shape, dtype)
