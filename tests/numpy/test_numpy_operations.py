"""ATB's operations on NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest
from atb_front_ends import check_operations

import alltoallv.numpy as an
from alltoallv import Communicator
from alltoallv.testing import Ranks


@pytest.mark.parametrize("size", [1, 2])
def test_operations(ranks: Ranks, size: int) -> None:
    def check(comm: Communicator) -> None:
        check_operations(comm, an, np.array, np.asarray, an.ErrorFeedback())

    ranks(size)(check)
