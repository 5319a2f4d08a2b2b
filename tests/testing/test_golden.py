"""Golden data: what cases promise, comparison of bits, files."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings

from alltoallv.testing import golden
from alltoallv.testing.golden import Case, assert_bits_equal


def check(case: Case) -> None:
    """What every case promises."""
    size = case.world_size
    assert len(case.outputs) == len(case.expected) == size
    assert (case.send_counts == case.recv_counts.T).all()
    for name in ("send_counts", "sdispls", "recv_counts", "rdispls"):
        matrix = getattr(case, name)
        assert matrix.dtype == np.int64
        assert matrix.shape == (size, size)
        assert (matrix >= 0).all()
    for r in range(size):
        assert (case.sdispls[r] + case.send_counts[r]).max() <= case.inputs[r].size
        covered = np.zeros(case.output_sizes[r], int)
        for begin, count in zip(case.rdispls[r], case.recv_counts[r], strict=True):
            assert begin + count <= covered.size
            covered[begin : begin + count] += 1
        assert covered.max(initial=0) <= 1
        untouched = covered == 0
        assert_bits_equal(case.expected[r][untouched], case.outputs[r][untouched])


@given(golden.cases())
@settings(max_examples=200)
def test_cases_keep_their_promises(case):
    check(case)


@pytest.mark.parametrize("dtype", golden.DTYPES)
def test_fill(dtype):
    rng = np.random.default_rng(0)
    array = golden.fill(rng, (100, 100), dtype)
    assert array.shape == (100, 100)
    assert array.dtype.name == dtype
    assert golden.fill(rng, 0, dtype).shape == (0,)
    patterns = np.unique(array.view(np.uint8))
    assert patterns.tolist() == ([0, 1] if dtype == "bool" else list(range(256)))


def test_bits_decide():
    assert_bits_equal(np.array([np.nan, -0.0]), np.array([np.nan, -0.0]))
    assert_bits_equal(np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T.copy())
    assert_bits_equal(np.float32(1), np.float32(1))
    payload = np.array([0x7FC00001], np.uint32).view(np.float32)
    for actual, expected, message in (
        (np.array([1, 0.0]), np.array([1, -0.0]), "1 of 2 elements differ, first at index 1: 0.0 (0x0000000000000000)"),
        (payload, np.array([np.nan], np.float32), "index 0: nan (0x7fc00001), expected nan (0x7fc00000)"),
        (np.eye(2), np.ones((2, 2)), "2 of 4 elements differ, first at index (0, 1): 0.0"),
        (np.zeros(2), np.zeros(3), "shape is (2,), expected (3,)"),
        (np.zeros(2), np.zeros(2, np.float32), "dtype is float64, expected float32"),
    ):
        with pytest.raises(AssertionError, match=re.escape(message)):
            assert_bits_equal(actual, expected)
    with pytest.raises(AssertionError, match=re.escape("rank 3: shape is")):
        assert_bits_equal(np.zeros(2), np.zeros(3), "rank 3")


@pytest.mark.parametrize("dtype", golden.DTYPES)
def test_files(tmp_path, dtype):
    case = golden.random_case(np.random.default_rng(1), 3, dtype, overlapping_sends=True)
    check(case)
    assert case.dtype.name == dtype
    golden.save(tmp_path / "case.npz", case)
    back = golden.load(tmp_path / "case.npz")
    assert repr(back) == repr(case)
    assert back.dtype == case.dtype
    for name in ("inputs", "outputs", "expected"):
        for ours, theirs in zip(getattr(back, name), getattr(case, name), strict=True):
            assert_bits_equal(ours, theirs)
