"""Random exchanges over every data path, as processes and as threads, against the reference, bit for bit.

1,000 exchanges per path for processes and 200 for threads, over 1 to 8 ranks. Outputs that the caller gives
are prefilled with random bits, so whatever is written between the regions shows.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
from exchange_cases import PATHS, SEED, Counts, Launch, bytes_of, make_cases, run_cases, total
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import mostly_slow

from alltoallv.testing import golden, reference, run_ranks

CASES = {"processes": 125, "threads": 25}  # for each of 8 world sizes

cached_cases = lru_cache(maxsize=None)(make_cases)


@pytest.mark.parametrize("size", mostly_slow(range(1, 9), (2, 3, 8)))
@pytest.mark.parametrize("path", PATHS)
def test_equal_to_the_reference(launch: Launch, path: str, size: int, request: pytest.FixtureRequest) -> None:
    mode = request.node.callspec.params["launch"]
    print(f"seed {SEED}, {CASES[mode]} exchanges")
    cases = cached_cases(size, CASES[mode], SEED)
    moved = total(launch(size, run_cases, cases, path, path=path))
    small = "inline" if path == "auto" else path
    assert moved == bytes_of(small, cases)


def test_every_dtype_and_kind_of_exchange_occurs() -> None:
    cases = [case for size in range(1, 9) for case in cached_cases(size, CASES["processes"], SEED)]
    assert len(cases) == 1000
    assert {case.dtype.name for case in cases} == set(golden.DTYPES)

    def packed(displs: Counts, counts: Counts) -> bool:
        return bool((displs == reference.packed(counts)).all())

    def overlaps(case: golden.Case) -> bool:
        return any(
            begin < other + k and other < begin + n
            for row, counts in zip(case.sdispls, case.send_counts, strict=True)
            for i, (begin, n) in enumerate(zip(row, counts, strict=True))
            for other, k in zip(row[:i], counts[:i], strict=True)
            if n and k
        )

    assert sum(packed(case.rdispls, case.recv_counts) for case in cases) > 50
    assert sum(not packed(case.rdispls, case.recv_counts) for case in cases) > 500
    assert sum(overlaps(case) for case in cases) > 200
    assert sum((case.send_counts == 0).any() for case in cases) > 500
    assert sum((case.send_counts == 0).all() for case in cases) > 10
    assert sum((case.send_counts > 0).all() for case in cases) > 100


@settings(max_examples=150)
@given(case=golden.cases(max_world_size=5), path=st.sampled_from([p for p in PATHS if p != "cma"]))
def test_any_exchange_on_threads(case: golden.Case, path: str) -> None:
    """What hypothesis finds, shrunk to few ranks and zero counts."""
    moved = total(run_ranks(case.world_size, run_cases, [case], path, path=path, threads=True))
    small = "inline" if path == "auto" else path
    assert moved == bytes_of(small, [case])
