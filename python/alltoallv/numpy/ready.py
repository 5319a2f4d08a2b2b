"""Calls whose checks have passed before: only the arrays are looked at again."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np

from alltoallv import _core
from alltoallv.communicator import Communicator
from alltoallv.numpy.arrays import Array


def arrays_of(
    input: np.dtype[Any], size: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, allocates: bool = True
) -> _core.Arrays:
    """Inputs of at least ``size`` elements, outputs of at least those of ``shape``; neither to be converted.

    ``allocates``: whether the call makes an output, of that shape, where it is given none.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    made = shape if allocates else None
    return _core.Arrays(np.ndarray, input.char, size * input.itemsize, dtype.char, nbytes, made, dtype)


def again(comm: Communicator, what: Hashable, input: object, out: object) -> Array | None:
    """Runs what `remember` was told of an equal call, and returns the output; None if there is no such call.

    ``what``: the operator, and the arguments that are no arrays.
    """
    if type(input) is not np.ndarray or (type(out) is not np.ndarray and out is not None):
        return None
    call: _core.ArrayCall | None = comm.repeats.find(_key(what, input, out))
    return None if call is None else call.run(input, out)


def remember(comm: Communicator, what: Hashable, input: object, out: object, call: _core.ArrayCall) -> None:
    """A call without gaps that has passed its checks: `again` finds it by the same arguments.

    Not of dtypes without a buffer format, such as bfloat16, whose arrays it would refuse.
    """
    if type(input) is np.ndarray and input.dtype.isbuiltin == 1 and (type(out) is np.ndarray or out is None):
        comm.repeats.keep(_key(what, input, out), call)


def _key(what: Hashable, input: Array, out: Array | None) -> Hashable:
    return what, input.dtype, input.shape, None if out is None else out.shape
