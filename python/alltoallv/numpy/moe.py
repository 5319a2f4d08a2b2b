"""Paddle's global_scatter and global_gather on NumPy arrays; `alltoallv._calls.experts` has the counts."""

from __future__ import annotations

from alltoallv._calls import signature
from alltoallv._calls.counts import Counts
from alltoallv._calls.expert_rows import ExpertRows
from alltoallv._calls.signature import described
from alltoallv.communicator import Communicator
from alltoallv.numpy.arrays import Array
from alltoallv.numpy.exchange import front_end

_rows = ExpertRows(front_end)


@described(signature.global_scatter)
def global_scatter(x: Array, local_count: Counts, global_count: Counts, group: Communicator | None = None) -> Array:
    made: Array = _rows.global_scatter(x, local_count, global_count, group)
    return made


@described(signature.global_gather)
def global_gather(x: Array, local_count: Counts, global_count: Counts, group: Communicator | None = None) -> Array:
    made: Array = _rows.global_gather(x, local_count, global_count, group)
    return made
