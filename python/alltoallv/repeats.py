"""Calls that repeat: what the checks of an earlier call have shown is not looked at again, only the arrays are."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable
from typing import Any, Protocol

from alltoallv import _core


class Repeats:
    """What a front end has made ready for the latest calls of one communicator; `_core.run_again` runs it."""

    __slots__ = ("calls",)
    limit = 256  # calls; programs whose counts change with every batch repeat none

    def __init__(self) -> None:
        self.calls: dict[Any, _core.ArrayCall] = {}

    def keep(self, what: Hashable, input: object, out: object, call: _core.ArrayCall) -> None:
        """A call without gaps that has passed its checks.

        Args:
            what: The operator, and the arguments that are no arrays: all that the checks depend on beside the arrays'
                dtypes and shapes.
            input, out: As they were given.
        """
        if (key := _core.call_key(what, input, out)) is None:
            return
        if len(self.calls) >= self.limit:
            self.calls.clear()
        with contextlib.suppress(TypeError):  # counts that are no integers
            self.calls[key] = call


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
