"""Cases predict results independently of the exchange that is measured."""

from __future__ import annotations

import numpy as np
import pytest

from alltoallv.testing import reference
from alltoallv_tools.bench.cases import PATTERNS, Case, bus_factor, moved_bytes, parse_bytes


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_predictions_equal_the_reference(pattern: str, size: int) -> None:
    case = Case("alltoallv", 4 * 1000, pattern=pattern)
    counts = case.counts(size)
    assert (counts >= 0).all()
    assert (counts.sum(1) == case.count).all()
    displs = np.cumsum(counts, 1) - counts
    outputs = reference.all_to_all_v(
        [case.input(j) for j in range(size)], counts, displs, counts.T, np.cumsum(counts.T, 1) - counts.T
    )
    for rank, output in enumerate(outputs):
        np.testing.assert_array_equal(output, case.expected(rank, size))


def test_sparse_has_one_peer_and_moe_leaves_some_out() -> None:
    assert (np.count_nonzero(Case("alltoallv", 4096, pattern="sparse").counts(8), axis=1) == 1).all()
    assert (Case("alltoallv", 4096, pattern="moe").counts(32) == 0).any()


@pytest.mark.parametrize("collective", ["alltoallv", "allgather", "allreduce", "quantized"])
def test_wrong_counts_what_differs(collective: str) -> None:
    case = Case(collective, 4096)
    good = case.expected(1, 3)
    assert case.wrong(good.copy(), good, 3) == 0
    bad = good.copy()
    bad[:5] += 7
    assert case.wrong(bad, good, 3) == 5
    assert case.wrong(bad[:-1], good, 3) == good.size


def test_sizes_and_bandwidths() -> None:
    assert parse_bytes("1K,3") == [1024, 3]
    assert parse_bytes("1K..16K") == [1024, 4096, 16384]
    assert parse_bytes("1K..20KiB") == [1024, 4096, 16384, 20480]
    assert bus_factor("alltoallv", 4) == 0.75
    assert bus_factor("allreduce", 4) == 1.5
    assert moved_bytes(Case("allgather", 100, "int8"), 4) == 400
