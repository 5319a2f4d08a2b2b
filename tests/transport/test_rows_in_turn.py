"""Operators of every kind in turn: what one leaves in a rank's rows must not show in the next that uses them."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_cases import Launch

from alltoallv import Communicator, empty
from alltoallv import numpy as av
from alltoallv.testing import reference


def data(rank: int, step: int, count: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).integers(0, 1 << 20, count).astype(np.int32)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_rows_that_say_something_else_each_time(launch: Launch, size: int) -> None:
    rng = np.random.default_rng(size)
    steps = rng.integers(0, 7, 150).tolist()
    small, mixed, large = (rng.integers(0, most, (size, size)) for most in (4, 300, 20_000))

    def program(comm: Communicator) -> list[str]:
        rank = comm.rank
        plans = {n: av.Plan(c[rank], c[:, rank], np.int32, group=comm) for n, c in enumerate((small, mixed, large))}
        wrong = []
        for at, kind in enumerate(steps):
            if kind <= 2:
                counts = (small, mixed, large)[kind]
                inputs = [data(r, at, int(counts[r].sum())) for r in range(size)]
                total = int(counts[:, rank].sum())
                out = (empty(total, np.int32), np.empty(total, np.int32), None)[at % 3]
                got = plans[kind](inputs[rank], out)
            elif kind == 3:  # learns its counts
                counts = mixed
                inputs = [data(r, at, int(counts[r].sum())) for r in range(size)]
                got = av.all_to_all_v(inputs[rank], counts[rank], group=comm)
            elif kind == 4:
                got = av.all_gather(data(rank, at, 700), group=comm)
                if not np.array_equal(got, [data(r, at, 700) for r in range(size)]):
                    wrong.append(f"all_gather at {at}")
                continue
            else:
                count = (5, 9_000)[kind - 5]
                got = av.all_reduce(data(rank, at, count), group=comm)
                if not np.array_equal(got, sum(data(r, at, count) for r in range(size))):
                    wrong.append(f"all_reduce at {at}")
                continue
            packed = [reference.packed(counts), reference.packed(counts.T)]
            blank = [np.zeros(int(counts[:, r].sum()), np.int32) for r in range(size)]
            expected = reference.all_to_all_v(inputs, counts, packed[0], counts.T, packed[1], blank)[rank]
            if not np.array_equal(got, expected):
                wrong.append(f"exchange {kind} at {at}")
        return wrong

    assert launch(size, program) == [[]] * size
