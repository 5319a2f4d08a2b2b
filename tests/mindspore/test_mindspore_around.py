"""The operators around an MoE's exchange, as kernels of NumPy arrays; tests/mindformers has them in graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from alltoallv.mindspore.primitives.kernels import KERNELS

X = np.array([[3, 1, 3], [2, 2, 0]], np.float32)


def run(name: str, *inputs: Any, shape: tuple[int, ...] = (2, 3), dtype: Any = np.float32) -> Any:
    out = np.full(shape, 9, dtype)
    KERNELS[name](inputs, [out])
    return out.tolist()


@pytest.mark.parametrize(("descending", "places"), [(0, [[1, 0, 2], [2, 0, 1]]), (1, [[0, 2, 1], [0, 1, 2]])])
@pytest.mark.parametrize("dim", [1, 0])
def test_sort_is_stable(descending: int, places: list[list[int]], dim: int) -> None:
    x = X if dim else X.T
    values, order = np.empty_like(x), np.empty(x.shape, np.int64)
    KERNELS["SortExt"]((x, np.array(dim), np.array(descending), np.array(0)), (values, order))
    assert (order if dim else order.T).tolist() == places
    assert values.tolist() == np.take_along_axis(x, order, dim).tolist()


def test_rows_are_chosen_and_added() -> None:
    index, alpha = np.array([1, 0, 1]), np.array(2)
    assert run("IndexSelect", X, np.array(0), index, shape=(3, 3)) == X[[1, 0, 1]].tolist()
    assert run("IndexSelect", X, np.array(-1), np.array([2]), shape=(2, 1)) == [[3], [0]]
    source = np.ones((3, 3), np.float32)
    want = (X + 2 * np.array([[1], [2]])).tolist()
    assert run("IndexAddExt", X, np.array(0), index, source, alpha) == want
    inside = X.copy()
    assert run("InplaceIndexAddExt", inside, np.array(0), index, source, alpha) == want == inside.tolist()
    half = np.array([2048], np.float16)  # each 1 alone would be lost
    ones = np.ones(2, np.float16)
    assert run("IndexAddExt", half, np.array(0), np.array([0, 0]), ones, np.array(1), shape=(1,)) == [2050]


def test_counts() -> None:
    assert run("CumsumExt", X, np.array(0), None) == [[3, 1, 3], [5, 3, 3]]
    assert run("FmodScalar", np.array([5, -5]), np.array(3), shape=(2,), dtype=np.int64) == [2, -2]
    assert run("MoveTo", X, None, np.array(1)) == X.tolist()
    on, off = np.array(7), np.array(-1)
    assert run("ExpandAs", X[:1], X) == [[3, 1, 3], [3, 1, 3]]
    chosen = np.array([2, 5])
    assert run("OneHotExt", chosen, np.array(3), on, off, np.array(-1)) == [[-1, -1, 7], [-1, -1, -1]]
    assert run("OneHotExt", chosen, np.array(3), on, off, np.array(0), shape=(3, 2)) == [[-1, -1], [-1, -1], [7, -1]]


def test_products_of_groups_and_their_gradients() -> None:
    random = np.random.default_rng(0)
    x, weight = random.normal(size=(5, 3)).astype(np.float32), random.normal(size=(3, 3, 2)).astype(np.float32)
    ends = np.array([2, 2, 4])
    got = run("GroupedMatmul", x, weight, None, ends, np.array(3), shape=(5, 2))
    np.testing.assert_allclose(got, [*(x[:2] @ weight[0]), *(x[2:4] @ weight[2]), [0, 0]], rtol=1e-6)
    got = run("GroupedMatmul", x.T, y := x[:, :2], None, ends, shape=(3, 3, 2))
    np.testing.assert_allclose(got, [x[:2].T @ y[:2], np.zeros((3, 2)), x[2:4].T @ y[2:4]], rtol=1e-6)
    both, dim = random.normal(size=(2, 4)), np.array(-1)

    def gated(values: Any) -> Any:
        return np.array(run("Swiglu", values, dim, shape=(2, 2), dtype=np.float64))

    a, b = both[:, :2], both[:, 2:]
    np.testing.assert_allclose(gated(both), a / (1 + np.exp(-a)) * b, rtol=1e-5)
    got = np.array(run("SwigluGrad", np.ones((2, 2)), both, dim, shape=(2, 4), dtype=np.float64))
    for place in np.ndindex(2, 4):
        step = np.zeros((2, 4))
        step[place] = 1e-2
        slope = (gated(both + step) - gated(both - step)).sum() / 2e-2
        np.testing.assert_allclose(got[place], slope, rtol=1e-2, atol=1e-3)


def test_what_bfloat16_lacks() -> None:
    half = np.array([2048, 1, 1], np.float16)  # with each 1 alone the sum would be rounded away
    assert run("AddN", half[:1], half[1:2], half[2:], shape=(1,)) == [2050]
    segments = np.array([1, 1, 1])
    assert run("UnsortedSegmentSum", half, segments, np.array(2), shape=(2,)) == [0, 2050]
    assert run("UnsortedSegmentSum", X, np.array([1, -1]), np.array(2)) == [[0, 0, 0], [3, 1, 3]]
    mask = np.array([[True, False, True], [False, True, False]])
    assert run("MaskedSelectGrad", X, mask, np.array([5, 6, 7])) == [[5, 0, 6], [0, 7, 0]]
    assert run("MaskedSelectGrad", X[:1], mask, np.array([5, 6, 7]), shape=(1, 3)) == [[5, 7, 6]]
    assert run("ReduceAny", X, np.array([-1]), np.array(0), shape=(2,), dtype=bool) == [True, True]
    assert run("ReduceAny", X * 0, np.array([], int), np.array(1), shape=(1, 1), dtype=bool) == [[False]]
