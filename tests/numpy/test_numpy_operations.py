"""ATB's operations on NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest
from atb_front_ends import check_operations
from on_ranks import on_ranks

import alltoallv.numpy as an
from alltoallv import Communicator


@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_operations(comm: Communicator) -> None:
    check_operations(comm, an, np.array, np.asarray, an.ErrorFeedback())
