"""An exchange whose arguments have passed this rank's checks, as autograd needs it: one that knows its transpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.counts import Layout, overlap, packed
from alltoallv.communicator import Communicator

T = TypeVar("T", bound="Transfer")


@dataclass(frozen=True, slots=True)
class Transfer:
    """Over shared memory; the layout is in elements, of which ``row`` make a unit of the caller's counts.

    ``timeout`` is in seconds, below 0 the communicator's; it holds for the gradient's exchange, too.
    """

    communicator: Communicator
    operator: str
    layout: Layout
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]
    row: int
    timeout: float = -1.0

    def transposed(self: T) -> T:
        """Outputs become inputs, which makes it the gradient. The send regions must not overlap."""
        sends, sdispls, recvs, rdispls = self.layout
        layout = (recvs, rdispls, sends, sdispls)
        return replace(self, layout=layout, shape_in=self.shape_out, shape_out=self.shape_in)

    def received(self: T, recvs: Sequence[int], shape_out: tuple[int, ...]) -> T:
        """With receive counts that were not known before."""
        sends, sdispls, _, _ = self.layout
        return replace(self, layout=(sends, sdispls, list(recvs), packed(recvs)), shape_out=shape_out)

    def has_gaps(self) -> bool:
        """Whether the output has elements that no region covers."""
        return sum(self.layout[2]) < math.prod(self.shape_out)

    def plan(self, dtype: str) -> _core.Plan:
        """For tensors of a dtype that the core calls so."""
        return _core.Plan(self.communicator.core, self.operator, dtype, *self.layout, 0, max(self.row, 1))


def packing(counts: Sequence[int], displs: Sequence[int]) -> npt.NDArray[np.int64] | None:
    """The elements of overlapping regions, one region after the other; None if none overlap.

    Gathered by the framework's own operator, whose gradient adds up what overlaps, they can be sent from packed places.
    """
    if not overlap(counts, displs):
        return None
    return np.concatenate([np.arange(d, d + n, dtype=np.int64) for n, d in zip(counts, displs, strict=True)])
