"""The competitors of a benchmark: they turn a case into a call that can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from alltoallv_tools.bench.cases import Case

Array = npt.NDArray[Any]


@dataclass
class Prepared:
    """A case that has been prepared on one rank.

    Attributes:
        call: what is timed.
        result: turns the call's return value into the result, a flat array.
        input: the memory that the call sends, not a copy of it: variants rewrite it.
        exact: False where there is no result to check (the limits).
        output: the memory that the call writes, if it is the same at every call; it is overwritten before the check.
    """

    call: Callable[[], Any]
    result: Callable[[Any], Array]
    input: Array
    exact: bool = True
    output: Array | None = None


class Competitor(Protocol):
    """One column of the table."""

    def prepare(self, case: Case) -> Prepared: ...


def spoil(array: Array | None) -> None:
    """Overwrites an output with a value that no correct result contains."""
    if array is not None:
        array.view(np.uint8).fill(0xA5)
