"""An element's sum depends on the ranks' values of this element alone: not on what else is in the call, nor where."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import InvalidParamError
from alltoallv.testing import Ranks

Array = np.ndarray[Any, Any]
DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
GROUP = 8  # elements per scale of the quantized reductions


def values(rank: int, rows: int, dtype: Any, seed: int) -> Array:
    """Of many magnitudes, so that sums in another order are other sums."""
    rng = np.random.default_rng([seed, rank])
    return (rng.normal(size=(rows, GROUP)) * 2.0 ** rng.integers(-6, 7, (rows, GROUP))).astype(dtype)


def check_slices(comm: Communicator, rows: int, cuts: list[int], dtype: str, seed: int, op: str) -> None:
    x = values(comm.rank, rows, DTYPES[dtype], seed)
    parts = np.split(x, cuts)
    calls = [
        lambda part: av.all_reduce(part, op, group=comm),
        lambda part: av.all_gather_v(
            av.reduce_scatter(part, shares(len(part), comm.size), op=op, group=comm), group=comm
        ),
    ]
    if dtype != "float64":
        calls += [
            lambda part: av.quantized_all_reduce(part, group_size=GROUP, group=comm),
            lambda part: av.quantized_all_reduce(part, group_size=GROUP, gather="quantized", bits=4, group=comm),
        ]
    for call in calls:
        whole = call(x).reshape(rows, GROUP)
        again = np.concatenate([call(part).reshape(len(part), GROUP) for part in parts])
        assert whole.tobytes() == again.tobytes()


def shares(rows: int, size: int) -> list[int]:
    """Uneven: the last rank gets what is left."""
    each = rows // (size + 1)
    return [*[each] * (size - 1), rows - each * (size - 1)]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(2, 4), st.integers(0, 400), st.lists(st.integers(0, 400), max_size=4), st.sampled_from(sorted(DTYPES)),
    st.integers(0, 999), st.sampled_from(["sum", "avg"]),
)  # fmt: skip
def test_any_slice_of_a_reduction_is_the_reduction_of_the_slice(
    ranks: Ranks, size: int, rows: int, cuts: list[int], dtype: str, seed: int, op: str
) -> None:
    ranks(size, threads=True)(check_slices, rows, sorted(min(cut, rows) for cut in cuts), dtype, seed, op)


@on_ranks(2)
def test_the_order_of_ranks_is_that_of_host_memory(comm: Communicator) -> None:
    x = values(comm.rank, 6, np.float32, 1)
    calls = (av.all_reduce, av.reduce_scatter, av.reduce)
    for call in calls:
        plain, ordered = call(x, group=comm), call(x, order="rank", group=comm)
        assert (plain is None and ordered is None) or plain.tobytes() == ordered.tobytes()
        with pytest.raises(InvalidParamError, match=r"order is 'ring', expected 'rank' or None.*A2A-1302"):
            call(x, order="ring" if comm.rank == 0 else None, group=comm)  # one rank's mistake is an error of all
