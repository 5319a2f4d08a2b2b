"""What the arrays of a call that repeats must be; `_core.Repeats` keeps such calls."""

from __future__ import annotations

import math
from typing import Any, Protocol

from alltoallv import _core


class Array(Protocol):
    """NumPy's or torch's."""

    @property
    def dtype(self) -> Any: ...


def arrays_of(
    input: Array, size: int, output: Array, shape: tuple[int, ...], *, allocates: bool = True
) -> _core.Arrays:
    """Arrays of the dtypes of these, to be taken as they are: inputs of at least ``size`` elements, outputs of at least
    those of ``shape``.

    ``allocates``: whether the call makes an output, of that shape, where it is given none.
    """
    return _core.Arrays(input, size, output, math.prod(shape), tuple(shape) if allocates else None)
