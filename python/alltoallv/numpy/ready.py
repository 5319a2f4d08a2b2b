"""Calls whose checks have passed before: only the arrays are looked at again."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np

from alltoallv import _core
from alltoallv.communicator import Communicator
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


def again(comm: Communicator, what: Hashable, input: object, out: object) -> Array | None:
    """Runs what `remember` was told of an equal call, and returns the output; None if there is no such call.

    ``what``: the operator, and the arguments that are no arrays.
    """
    if type(input) is not np.ndarray or (type(out) is not np.ndarray and out is not None):
        return None
    ready: Ready | None = comm.repeats.find(_key(what, input, out))
    return None if ready is None else ready(input, out)


def remember(comm: Communicator, what: Hashable, input: object, out: object, ready: Ready) -> None:
    """A call without gaps that has passed its checks: `again` finds it by the same arguments.

    Not of dtypes without a buffer format, such as bfloat16, whose arrays `Ready` would refuse.
    """
    if type(input) is np.ndarray and input.dtype.isbuiltin == 1 and (type(out) is np.ndarray or out is None):
        comm.repeats.keep(_key(what, input, out), ready)


def _key(what: Hashable, input: Array, out: Array | None) -> Hashable:
    return what, input.dtype, input.shape, None if out is None else out.shape
