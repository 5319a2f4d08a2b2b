"""Calls whose checks an earlier call has passed: only the arrays are looked at."""

from __future__ import annotations

from collections.abc import Hashable

from alltoallv import _core
from alltoallv.communicator import Communicator
from alltoallv.numpy.arrays import Array


def again(comm: Communicator, what: Hashable, input: object, out: object) -> Array | None:
    """Runs what `Repeats.keep` was told of an equal call, and returns the output; None if there is no such call."""
    return _core.run_again(comm.repeats.calls, what, input, out)
