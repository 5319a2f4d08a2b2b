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
    input: np.dtype[Any], size: int, shape: tuple[int, ...], output: np.dtype[Any], *, allocates: bool = True
) -> _core.Arrays:
    """Inputs of at least ``size`` elements, outputs of at least those of ``shape``; neither to be converted.

    ``allocates``: whether the call makes an output, of that shape, where it is given none.
    """
    return _core.Arrays(input, size, output, math.prod(shape), shape if allocates else None)


def again(comm: Communicator, what: Hashable, input: object, out: object) -> Array | None:
    """Runs what `remember` was told of an equal call, and returns the output; None if there is no such call.

    ``what``: the operator, and the arguments that are no arrays.
    """
    return _core.run_again(comm.repeats.calls, what, input, out)


def remember(comm: Communicator, what: Hashable, input: object, out: object, call: _core.ArrayCall) -> None:
    """A call without gaps that has passed its checks: `again` finds it by the same arguments."""
    if (key := _core.call_key(what, input, out)) is not None:
        comm.repeats.keep(key, call)
