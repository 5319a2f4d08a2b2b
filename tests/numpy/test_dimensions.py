"""One dimension of an array for another."""

from __future__ import annotations

from on_ranks import on_ranks
from swaps import check_swaps

import alltoallv.numpy as an
from alltoallv import Communicator


@on_ranks(3)
def test_by_the_definition(comm: Communicator) -> None:
    check_swaps(an, lambda x: x, None, comm, comm, dtypes=["float32", "int8", "complex128", "bool"])
