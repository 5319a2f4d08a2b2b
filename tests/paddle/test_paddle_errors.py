"""Every bad argument of every function: the right class, a sentence that says what was wrong, and peers that know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

import alltoallv.paddle as ap
from alltoallv import Communicator
from alltoallv.errors import AllToAllVError, InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.testing import Ranks

PARAM, TENSOR = InvalidParamError, InvalidTensorError


def ones(*shape: int, dtype: str = "float32") -> paddle.Tensor:
    return paddle.ones(list(shape), dtype)


def counts(*values: int, dtype: str = "int64") -> paddle.Tensor:
    return paddle.to_tensor(list(values), dtype=dtype)


def wanting(x: paddle.Tensor) -> paddle.Tensor:
    x.stop_gradient = False
    return x


def overlapping(c: Communicator) -> None:
    x = ones(8)
    ap.alltoall_single(x[:4], x[2:6], group=c)


def sparse() -> Any:
    return paddle.sparse.sparse_coo_tensor([[0, 1]], [1.0, 2.0], [4])


#: What one rank does, the error it gets, and its text.
BAD: dict[str, tuple[Callable[[Communicator], Any], type[Exception], str]] = {
    "no tensor": (lambda c: ap.all_to_all_v(np.ones(4), [2, 2], group=c), TypeError, "input is a ndarray, expected a"),
    "no tensor to write": (lambda c: ap.alltoall_single(ones(4), None, group=c), TypeError, "out_tensor is a NoneType"),
    "sparse": (lambda c: ap.alltoall_single(sparse(), ones(4), group=c), TENSOR, "in_tensor is a sparse tensor"),
    "unit": (lambda c: ap.all_to_all_v(ones(4), [2, 2], unit="rows", group=c), PARAM, "unit is 'rows', expected"),
    "negative": (lambda c: ap.all_to_all_v(ones(4), [-1, 2], [2, 2], group=c), PARAM, "send_counts"),
    "beyond": (lambda c: ap.all_to_all_v(ones(4), [3, 2], [2, 2], group=c), PARAM, "5|3"),
    "out without counts": (
        lambda c: ap.all_to_all_v(ones(4), [2, 2], out=ones(4), group=c), PARAM, "recv_counts is None"
    ),
    "out with gradient": (
        lambda c: ap.all_to_all_v(wanting(ones(4)), [2, 2], [2, 2], out=ones(4), group=c), PARAM, "wants a gradient"
    ),
    "learning later, with gradient": (
        lambda c: ap.all_to_all_v(wanting(ones(4)), [2, 2], group=c, async_op=True), PARAM, "wants a gradient"
    ),
    "rows of a scalar": (lambda c: ap.all_to_all_v(ones(), [1, 1], unit="row", group=c), TENSOR, "0-dimensional"),
    "splits": (
        lambda c: ap.alltoall_single(ones(4), ones(4), [1, 2], [2, 2], group=c),
        PARAM, r"in_split_sizes is \[1, 2\], expected entries >= 0 whose sum is 4, dimension 0 of in_tensor",
    ),
    "number of splits": (
        lambda c: ap.alltoall_single(ones(4), ones(4), None, [4], group=c), PARAM, "out_split_sizes has 1 entries"
    ),
    "indivisible": (
        lambda c: ap.alltoall_single(ones(3), ones(4), group=c), PARAM, "3 rows in dimension 0, which 2 ranks"
    ),
    "dtypes": (
        lambda c: ap.alltoall_single(ones(4), ones(4, dtype="int32"), group=c),
        TENSOR, "out_tensor has dtype int32, expected float32",
    ),
    "row shapes": (
        lambda c: ap.alltoall_single(ones(4, 2), ones(4, 3), group=c), TENSOR, r"rows of shape \(3,\), expected \(2,\)"
    ),
    "strided": (lambda c: ap.alltoall_single(ones(4, 2), ones(2, 4).T, group=c), TENSOR, "out_tensor is not contig"),
    "overlap": (overlapping, PARAM, "overlap in memory"),
    "no list": (lambda c: ap.alltoall(ones(2), [], group=c), TypeError, "in_tensor_list is a Tensor"),
    "no inputs": (lambda c: ap.alltoall([], [], group=c), RuntimeError, "The input tensor_list should not be empty."),
    "inputs": (lambda c: ap.alltoall([ones(1)], [], group=c), PARAM, "in_tensor_list has 1 tensors, expected 2"),
    "list dtypes": (
        lambda c: ap.alltoall([ones(1), ones(1, dtype="int64")], [], group=c),
        TENSOR, "Invalid usage of tensors with different dtypes: float32, int64",
    ),
    "outputs overlap": (
        lambda c: ap.alltoall([ones(1), ones(1)], [(x := ones(1)), x], group=c),
        PARAM, r"out_tensor_list\[0\] and out_tensor_list\[1\] overlap",
    ),
    "counts to exchange": (lambda c: ap.exchange_counts([1, -1], c), PARAM, "expected entries >= 0"),
    "local_count dtype": (
        lambda c: ap.global_scatter(ones(2, 1), counts(1, 1, dtype="int32"), counts(1, 1), c),
        TENSOR, "Please use int64 type in local_count",
    ),
    "global_count dtype": (
        lambda c: ap.global_gather(ones(2, 1), counts(1, 1), counts(1, 1, dtype="float32"), c),
        TENSOR, "Please use int64 type in global_count",
    ),
    "experts": (
        lambda c: ap.global_scatter(ones(3, 1), counts(1, 1, 1), counts(1, 1, 1), c),
        PARAM, r"local_count has dtype paddle.int64 and shape \(3,\), expected integers, 2 cards times",
    ),
    "lengths": (
        lambda c: ap.global_scatter(ones(2, 1), counts(1, 1), counts(1, 1, 1, 1), c),
        PARAM, "local_count has 2 entries and global_count 4",
    ),
    "rows": (lambda c: ap.global_scatter(ones(3, 1), counts(1, 1), counts(1, 1), c), PARAM, "sums to 2, expected 3"),
    "rows to gather": (
        lambda c: ap.global_gather(ones(3, 1), counts(1, 2), counts(1, 1), c), PARAM, "global_count sums to 2"
    ),
    "negative rows": (
        lambda c: ap.global_scatter(ones(2, 1), counts(3, -1), counts(1, 1), c), PARAM, r"local_count is \[3, -1\]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_one_rank_refuses_fails_on_all(ranks: Ranks, case: str) -> None:
    def check(comm: Communicator) -> None:
        call, error, text = BAD[case]
        if comm.rank == 1:
            with pytest.raises(error, match=text):
                call(comm)
        else:
            with pytest.raises(AllToAllVError, match="rank 1.*(" + text + ")"):
                ap.all_to_all_v(ones(4), [2, 2], [2, 2], group=comm)
        assert ap.all_to_all_v(ones(4), [2, 2], [2, 2], group=comm).tolist() == [1] * 4

    ranks(2)(check)


DISAGREEMENTS: dict[str, Callable[[Communicator], Any]] = {
    "counts": lambda c: ap.all_to_all_v(ones(4), [2, 2], [1, 2], group=c),
    "dtype": lambda c: ap.all_to_all_v(ones(4, dtype="float64"), [2, 2], [2, 2], group=c),
    "operator": lambda c: ap.alltoall_single(ones(4), ones(4), group=c),
    "rows": lambda c: ap.all_to_all_v(ones(2, 2), [1, 1], [1, 1], unit="row", group=c),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_ranks_that_disagree_get_the_same_error(ranks: Ranks, case: str) -> None:
    def check(comm: Communicator) -> str:
        good = lambda comm: ap.all_to_all_v(ones(4), [2, 2], [2, 2], group=comm)  # noqa: E731
        with pytest.raises(PeerMismatchError, match="rank 1") as info:
            (DISAGREEMENTS[case] if comm.rank == 1 else good)(comm)
        assert good(comm).tolist() == [1] * 4
        return str(info.value)

    first, second = ranks(2)(check)
    assert first == second


def test_experts_that_disagree(ranks: Ranks) -> None:
    def check(comm: Communicator) -> None:
        told = counts(1, 1 + comm.rank)
        with pytest.raises(PeerMismatchError, match="rank 1 sends 1 rows to expert 0 of rank 1, which expects 2"):
            ap.global_scatter(ones(2, 1), counts(1, 1), told, comm)

    ranks(2)(check)


def test_an_error_in_backward_is_an_error_on_all(ranks: Ranks) -> None:
    """Paddle gives it another class, and keeps ours in the text."""

    def check(comm: Communicator) -> None:
        y = ap.all_to_all_v(wanting(ones(2)), [1, 1], [1, 1], group=comm)
        call = (lambda: ap.exchange_counts([1, 1], comm)) if comm.rank else y.sum().backward
        with pytest.raises((OSError, PeerMismatchError), match=r"PeerMismatchError|exchange_counts"):
            call()
        assert ap.exchange_counts([1, 1], comm).tolist() == [1, 1]

    ranks(2)(check)


@pytest.mark.parametrize("group", ["default", 3])
def test_no_group(group: Any) -> None:
    with pytest.raises(InvalidParamError, match="expected a Paddle group, a Communicator or None"):
        ap.all_to_all_v(ones(1), [1], [1], group=group)
    with pytest.raises(InvalidParamError, match="expected different ranks below 1"):
        ap.new_group([0, 1])


def test_alone_and_in_static_mode() -> None:
    """Without a launcher the job is one process."""
    assert ap.all_to_all_v(paddle.arange(6.0), [3], [3], sdispls=[2]).tolist() == [2, 3, 4]
    rows = wanting(ones(3, 2))
    ap.global_gather(ap.global_scatter(rows, counts(1, 2), counts(1, 2)), counts(1, 2), counts(1, 2)).sum().backward()
    assert rows.grad.tolist() == ones(3, 2).tolist()
    assert ap.alltoall_single(ones(2), out := paddle.zeros([2]), group=ap.new_group([0])).wait()
    assert out.tolist() == [1, 1]
    x = ones(1)
    paddle.enable_static()
    try:
        with pytest.raises(RuntimeError, match="only supported in dygraph mode"):
            ap.all_to_all_v(x, [1], [1])
    finally:
        paddle.disable_static()
