"""Private memory that outgrows the caches is read straight and by way of a block in them, in turn, to the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_cases import Launch

from alltoallv import Communicator
from alltoallv import numpy as av

LEAST = 1 << 20  # bytes of a piece; the first three are read straight, the next three by way of a block


@pytest.mark.parametrize("size", [2, 3])
def test_both_ways_move_the_same_bits(launch: Launch, size: int) -> None:
    def program(comm: Communicator) -> tuple[int, int]:
        # More than most last-level caches hold, in pieces that end anywhere; behind each region a gap of 5 bytes.
        cache = 64 << 20
        counts = [cache // size + 3 * LEAST + 1237 * (i + 1) for i in range(size)]
        mine = counts[comm.rank]
        displs = np.cumsum([0, *(count + 5 for count in counts)])
        x = np.random.default_rng(comm.rank).integers(0, 256, mine, np.uint8)
        y = np.full(displs[-1], 7, np.uint8)
        before = comm.stats()["bytes_cma"]
        av.all_to_all_v(x, [mine] * size, counts, sdispls=[0] * size, rdispls=displs[:-1], out=y, group=comm)
        wrong = 0
        for j, begin in enumerate(displs[:-1]):
            sent = np.random.default_rng(j).integers(0, 256, counts[j], np.uint8)
            wrong += int((y[begin : begin + counts[j]] != sent).sum())
            wrong += int((y[begin + counts[j] : begin + counts[j] + 5] != 7).sum())
        return wrong, comm.stats()["bytes_cma"] - before - (sum(counts) - mine)

    assert launch(size, program, path="cma") == [(0, 0)] * size
