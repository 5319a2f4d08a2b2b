"""The oracle itself: literal numbers, and properties; tests/matrix has the published examples."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alltoallv.testing import golden, reference
from alltoallv.testing.golden import assert_bits_equal


def as_lists(arrays):
    return [np.asarray(array).tolist() for array in arrays]


# --- all_to_all_v


def test_displacements_gaps_and_prefilled_outputs():
    inputs = [np.array([1, 2, 3, 4]), np.array([5, 6, 7, 8])]
    found = reference.all_to_all_v(
        inputs,
        send_counts=[[1, 2], [0, 3]],
        sdispls=[[3, 1], [4, 0]],
        recv_counts=[[1, 0], [2, 3]],
        rdispls=[[2, 0], [4, 0]],
        outputs=[np.full(4, -1), np.full(7, -1)],
    )
    assert as_lists(found) == [[-1, -1, 4, -1], [5, 6, 7, -1, 2, 3, -1]]
    zeros = reference.all_to_all_v(inputs, [[1, 2], [0, 3]], [[3, 1], [4, 0]], rdispls=[[2, 0], [4, 0]])
    assert as_lists(zeros) == [[0, 0, 4], [5, 6, 7, 0, 2, 3]]


@given(golden.cases())
def test_exchange_is_a_loop_over_elements(case):
    """Element by element on raw bytes, independently of the slices in the reference."""
    width = case.dtype.itemsize
    for r, expected in enumerate(case.expected):
        data = bytearray(case.outputs[r].tobytes())
        for j in range(case.world_size):
            source = case.inputs[j].tobytes()
            for k in range(int(case.recv_counts[r, j])):
                a, b = (int(case.rdispls[r, j]) + k) * width, (int(case.sdispls[j, r]) + k) * width
                data[a : a + width] = source[b : b + width]
        assert bytes(data) == expected.tobytes()


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_gather_inverts_scatter(size, experts, seed):
    rng = np.random.default_rng(seed)
    local = rng.integers(0, 4, (size, size * experts))
    global_ = np.array(
        [[local[i // experts][i % experts + r * experts] for i in range(size * experts)] for r in range(size)]
    )
    inputs = [golden.fill(rng, (int(row.sum()), 3), "bfloat16") for row in local]
    scattered = reference.global_scatter(inputs, local.tolist(), global_.tolist())
    assert [len(rows) for rows in scattered] == global_.sum(axis=1).tolist()
    for actual, expected in zip(
        reference.global_gather(scattered, local.tolist(), global_.tolist()), inputs, strict=True
    ):
        assert_bits_equal(actual, expected)


def test_wrong_counts_are_refused():
    x = [np.arange(4), np.arange(4)]
    with pytest.raises(ValueError, match=r"send_counts\[1\]\[0\] is 1 but recv_counts\[0\]\[1\] is 2"):
        reference.all_to_all_v(x, [[1, 1], [1, 1]], recv_counts=[[1, 2], [1, 1]])
    with pytest.raises(ValueError, match="from rank 0 to rank 1 lies outside"):
        reference.all_to_all_v(x, [[0, 3], [0, 0]], [[0, 2], [0, 0]])
    with pytest.raises(ValueError, match="are negative"):
        reference.all_to_all_v(x, [[-1, 0], [0, 0]])
    with pytest.raises(ValueError, match="3, does not divide by 2"):
        reference.all_to_all_single([np.arange(3), np.arange(3)])
    with pytest.raises(ValueError, match="do not add up"):
        reference.all_to_all_single(x, [[1, 1], [2, 2]])
    with pytest.raises(ValueError, match=r"global_counts\[0\]\[1\] is 5, but local_counts\[1\]\[0\] is 1"):
        reference.global_scatter(x, [[2, 2], [1, 3]], [[2, 5], [2, 3]])


# --- gathers, broadcast, reductions


def test_gathers_and_broadcast():
    inputs = [np.array([1, 2]), np.array([3]), np.array([], np.int64)]
    assert [as_lists(arrays) for arrays in reference.all_gather(inputs)] == [[[1, 2], [3], []]] * 3
    assert as_lists(reference.all_gather_into_tensor(inputs)) == [[1, 2, 3]] * 3
    assert as_lists(reference.broadcast(inputs, 1)) == [[3]] * 3


@pytest.mark.parametrize(
    ("dtype", "op", "values", "expected"),
    [
        ("int8", "sum", [[100, -100], [100, -100]], [-56, 56]),
        ("uint8", "prod", [[16, 3], [17, 5]], [16, 15]),
        ("int64", "min", [[3, -2], [1, 5]], [1, -2]),
        ("uint64", "max", [[2**63, 0], [1, 7]], [2**63, 7]),
        ("bool", "sum", [[False, True], [False, True]], [False, True]),
        ("bool", "prod", [[True, True], [True, False]], [True, False]),
        ("bool", "max", [[True, False], [False, False]], [True, False]),
        ("bool", "min", [[True, True], [False, True]], [False, True]),
        ("float64", "avg", [[1.0, 2.0], [2.0, 4.0]], [1.5, 3.0]),
        ("float16", "sum", [[65504.0, 1.0], [65504.0, 2.0]], [np.inf, 3.0]),
        ("float16", "avg", [[65504.0], [65504.0]], [65504.0]),  # the sum in float32 does not overflow
    ],
)
def test_reductions(dtype, op, values, expected):
    inputs = [np.array(row, dtype) for row in values]
    for found in reference.all_reduce(inputs, op):
        assert_bits_equal(found, np.array(expected, dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rounds_once(dtype):
    """1 + eps/2 + eps/2: rounding every step, half to even, would stay at 1."""
    kind = golden.dtype_of(dtype)
    epsilon = float(ml_dtypes.finfo(kind).eps)
    inputs = [np.array([value], kind) for value in (1.0, epsilon / 2, epsilon / 2)]
    assert float(reference.all_reduce(inputs)[0][0]) == 1 + epsilon


def test_float32_sum_is_in_rank_order():
    inputs = [np.array([value], np.float32) for value in (1e8, -1e8, 1.0)]
    assert as_lists(reference.all_reduce(inputs)) == [[1.0]] * 3
    assert as_lists(reference.all_reduce([inputs[2], *inputs[:2]])) == [[0.0]] * 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "prod"])
def test_nan_is_kept_and_canonical(dtype, op):
    kind = golden.dtype_of(dtype)
    bits = f"u{kind.itemsize}"
    negative_with_payload = (-np.ones(1, kind)).view(bits) | np.array([np.inf], kind).view(bits) | np.array([5], bits)
    inputs = [np.array([1], kind), negative_with_payload.view(kind), np.array([2], kind)]
    quiet = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8000000000000}[dtype]
    for order in (inputs, inputs[1:] + inputs[:1], inputs[::-1]):
        assert reference.all_reduce(order, op)[0].view(bits)[0] == quiet
    assert_bits_equal(reference.all_reduce(inputs[1:2], op)[0], inputs[1])  # a single rank's input stays as it is


@pytest.mark.parametrize("op", ["min", "max"])
def test_ties_keep_the_earlier_operand(op):
    for first, second in ((0.0, -0.0), (-0.0, 0.0)):
        inputs = [np.array([first], np.float32), np.array([second], np.float32)]
        assert_bits_equal(reference.all_reduce(inputs, op)[0], inputs[0])


def test_reduce_scatter():
    inputs = [np.arange(6), 10 * np.arange(6)]
    assert as_lists(reference.reduce_scatter(inputs)) == [[0, 11, 22], [33, 44, 55]]
    assert as_lists(reference.reduce_scatter(inputs, "max", [1, 5])) == [[0], [10, 20, 30, 40, 50]]
