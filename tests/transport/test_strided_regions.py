"""Exchanges whose regions lie in rows, of other lengths in the input than in the output, over every data path."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_cases import COUNTERS, PATHS, PLACES, Launch, put
from hypothesis import given, settings
from hypothesis import strategies as st
from swaps import Case, random_case

import alltoallv.numpy as an
from alltoallv import Communicator
from alltoallv.testing import golden, run_ranks
from alltoallv.testing.golden import assert_bits_equal

DTYPES = ("uint8", "float16", "float32", "complex128")


def run(comm: Communicator, cases: list[Case], path: str) -> dict[str, int]:
    """Every second input has gaps of its own, as one of several tensors that lie in one; returns the byte counters."""
    in_arena = PLACES[path][0]
    for number, case in enumerate(cases):
        x = case.inputs[comm.rank]
        if number % 2:
            wide = put(np.zeros((*x.shape[:-1], x.shape[-1] + 3), x.dtype), in_arena)
            given_x = wide[..., 2:-1]
            given_x[...] = x
        else:
            given_x = put(x, in_arena)
        found = an.all_to_all_nd(given_x, case.scatter, case.gather, comm, **case.sizes())
        about = f"case {number}: {[x.shape for x in case.inputs]} {case[1:]}"
        assert_bits_equal(found, case.wanted()[comm.rank], about)
    return {name: comm.stats()[name] for name in COUNTERS}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("path", PATHS)
def test_equal_to_the_reference(launch: Launch, path: str, size: int) -> None:
    rng = np.random.default_rng([7, size])
    cases = [random_case(rng, size, DTYPES[number % len(DTYPES)]) for number in range(40)]
    cases.append(random_case(rng, size, "float64", 50))
    counters = launch(size, run, cases, path, path=path)
    # process_vm_readv reads whole pieces: rows go through the rings there.
    used = f"bytes_{'staged' if path == 'cma' else path}"
    if size > 1 and path != "auto":
        assert sum(each[used] for each in counters) > 0


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    path=st.sampled_from(PATHS),
    dtype=st.sampled_from(golden.DTYPES),
)
def test_any_on_threads(seed: int, size: int, path: str, dtype: str) -> None:
    case = random_case(np.random.default_rng(seed), size, golden.dtype_of(dtype))
    run_ranks(size, run, [case], path, path=path, threads=True)


@pytest.mark.parametrize("path", ["push", "pull", "staged"])
def test_larger_than_caches(launch: Launch, path: str) -> None:
    """Streaming stores, in chunks of more than a row and of less, and with threads that help."""
    rng = np.random.default_rng(8)
    x = [rng.integers(0, 255, (3, 70, 12, 4100), dtype=np.uint8) for _ in range(2)]
    cases = [Case(x, 2, 1, None, None), Case(x, 1, 0, [69, 1], None), Case(x, 0, 3, [0, 3], None)]
    launch(2, run, cases, path, path=path)
