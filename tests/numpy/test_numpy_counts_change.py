"""Counts whose reading runs code of the caller, which changes the arrays of the call."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from on_ranks import on_ranks

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import InvalidParamError

N = 1 << 20


class Resizes:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __index__(self) -> int:
        self._array.resize((2, 2), refcheck=False)
        return N


@on_ranks(2)
def test_arrays_that_are_resized(comm: Communicator) -> None:
    for way in ("input", "out", "single"):
        x, out = np.ones(2 * N), np.ones(2 * N)
        last = Resizes(x if way == "input" else out) if comm.rank == 1 else N
        splits = [N, N], [N, last]
        call = functools.partial(av.all_to_all_v, x, *splits, out=out, group=comm)
        if way == "single":
            call = functools.partial(av.all_to_all_single, out, x, *splits[::-1], group=comm)
        with pytest.raises(InvalidParamError, match=r"changed while.*A2A-1029"):
            call()
        assert av.all_reduce(np.ones(3), group=comm).tolist() == [2] * 3
