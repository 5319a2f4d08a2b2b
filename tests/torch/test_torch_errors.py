"""Mistakes: torch's exceptions for torch's functions, ours where torch is silent, on all ranks, and life goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_groups import caught

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.testing import Ranks


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


OVERLAPPING = torch.ones(6)
#: What rank 0 does wrong, on 2 ranks: the call, the exception, a part of its text.
MISTAKES: dict[str, tuple[Callable[[Communicator], Any], type[Exception], str]] = {
    "dtypes of a list": (
        lambda c: at.all_to_all([ones(1), ones(1).int()], [ones(1)] * 2, c),
        ValueError,
        "Invalid usage of tensors with different dtypes",
    ),
    "dtype of the output": (
        lambda c: at.all_to_all_single(ones(2).int(), ones(2), group=c),
        ValueError,
        "Invalid usage of tensors with different dtypes",
    ),
    "dtype of the gathered output": (
        lambda c: at.all_gather_into_tensor(ones(4).double(), ones(2), c),
        ValueError,
        "Invalid usage of tensors with different dtypes",
    ),
    "splits that do not add up": (
        lambda c: at.all_to_all_single(ones(2), ones(2), [1, 1], [1, 2], c),
        ValueError,
        r"input_split_sizes is \[1, 2\], expected entries >= 0 whose sum is 2",
    ),
    "output splits that do not add up": (
        lambda c: at.all_to_all_single(ones(3), ones(2), [1, 1], [1, 1], c),
        ValueError,
        r"output_split_sizes is \[1, 1\]",
    ),
    "negative splits": (
        lambda c: at.all_to_all_single(ones(2), ones(2), [1, 1], [3, -1], c),
        ValueError,
        r"input_split_sizes is \[3, -1\]",
    ),
    "splits for another number of ranks": (
        lambda c: at.all_to_all_single(ones(2), ones(2), [1, 1], [1, 1, 0], c),
        ValueError,
        "input_split_sizes has 3 entries, expected 2",
    ),
    "rows that do not divide": (
        lambda c: at.all_to_all_single(ones(3), ones(3), group=c),
        ValueError,
        "3 rows in dimension 0, which 2 ranks cannot share equally",
    ),
    "rows that differ": (
        lambda c: at.all_to_all_single(ones(2, 2), ones(2, 3), group=c),
        InvalidTensorError,
        r"output has rows of shape \(2,\), expected \(3,\)",
    ),
    "lists too short": (
        lambda c: at.all_to_all([ones(1)], [ones(1)] * 2, c),
        ValueError,
        "output_tensor_list has 1 tensors, expected 2",
    ),
    "no tensors in the list": (
        lambda c: at.all_to_all([1.0, 2.0], [ones(1)] * 2, c),
        TypeError,
        "expected torch.Tensor",
    ),
    "outputs that overlap": (
        lambda c: at.all_to_all([OVERLAPPING[:4], OVERLAPPING[3:]], [ones(4), ones(3)], c),
        InvalidParamError,
        r"output_tensor_list\[0\] and output_tensor_list\[1\] overlap",
    ),
    "output over input": (
        lambda c: at.all_to_all_single(OVERLAPPING[:2], OVERLAPPING[1:3], group=c),
        InvalidParamError,
        "overlap in memory",
    ),
    "output not contiguous": (
        lambda c: at.all_to_all_single(ones(4, 2)[:, :1], ones(4, 1), group=c),
        InvalidTensorError,
        "output is not contiguous",
    ),
    "gathered size": (
        lambda c: at.all_gather_into_tensor(ones(5), ones(2), c),
        InvalidTensorError,
        "output_tensor has 5 elements, expected 2 times the 2",
    ),
    "a sparse tensor": (
        lambda c: at.all_to_all_v(ones(4).to_sparse(), [2, 2], [2, 2], group=c),
        InvalidTensorError,
        "layout torch.sparse_coo",
    ),
    "zeros without memory": (
        lambda c: at.all_to_all_v(torch._efficientzerotensor(4), [2, 2], [2, 2], group=c),
        InvalidTensorError,
        "is a zero tensor",
    ),
    "no tensor": (lambda c: at.all_to_all_v([1.0, 2.0], [1, 1], [1, 1], group=c), TypeError, "input is a list"),
    "a tensor on another device": (
        lambda c: at.all_to_all_v(torch.ones(4, device="meta"), [2, 2], [2, 2], group=c),
        InvalidTensorError,
        "lie on meta, expected cpu",
    ),
    "a dtype without a size": (
        lambda c: at.all_to_all_v(torch.quantize_per_tensor(ones(4), 1, 0, torch.qint8), [2, 2], [2, 2], group=c),
        InvalidTensorError,
        "qint8",
    ),
    "counts beyond the input": (
        lambda c: at.all_to_all_v(ones(3), [2, 2], [2, 2], group=c),
        InvalidParamError,
        "send",
    ),
    "negative counts": (lambda c: at.all_to_all_v(ones(4), [5, -1], [2, 2], group=c), InvalidParamError, "-1"),
    "negative displacements": (
        lambda c: at.all_to_all_v(ones(4), [2, 2], [2, 2], sdispls=[-1, 0], group=c),
        InvalidParamError,
        "-1",
    ),
    "fractional counts": (
        lambda c: at.all_to_all_v(ones(4), [2.0, 2.0], [2, 2], group=c),
        InvalidParamError,
        "expected 2 integers",
    ),
    "boolean counts": (
        lambda c: at.all_to_all_v(ones(4), torch.tensor([True, True]), [2, 2], group=c),
        InvalidParamError,
        "expected 2 integers",
    ),
    "receive regions that overlap": (
        lambda c: at.all_to_all_v(ones(4), [2, 2], [2, 2], rdispls=[0, 1], group=c),
        InvalidParamError,
        "overlap",
    ),
    "an unknown unit": (
        lambda c: at.all_to_all_v(ones(4), [2, 2], [2, 2], unit="rows", group=c),
        InvalidParamError,
        "unit is 'rows'",
    ),
    "rows of no dimension": (
        lambda c: at.all_to_all_v(torch.tensor(1.0), [1, 0], [1, 0], unit="row", group=c),
        InvalidTensorError,
        "0-dimensional",
    ),
    "out and gradients": (
        lambda c: at.all_to_all_v(ones(4).requires_grad_(), [2, 2], [2, 2], out=ones(4), group=c),
        InvalidParamError,
        "requires grad",
    ),
    "out without recv_counts": (
        lambda c: at.all_to_all_v(ones(4), [2, 2], out=ones(4), group=c),
        InvalidParamError,
        "out is given but recv_counts is None",
    ),
    "out too small": (
        lambda c: at.all_to_all_v(ones(4), [2, 2], [2, 2], out=ones(3), group=c),
        InvalidParamError,
        "3",
    ),
    "dtype of out": (
        lambda c: at.all_to_all_v(ones(4), [2, 2], [2, 2], out=ones(4).half(), group=c),
        InvalidTensorError,
        "out has dtype float16",
    ),
    "shape of out": (
        lambda c: at.all_to_all_v(ones(4, 2), [2, 2], [2, 2], unit="row", out=ones(4, 3), group=c),
        InvalidTensorError,
        r"out has rows of shape \(3,\)",
    ),
    "counts to exchange": (lambda c: at.exchange_counts([1, -1], c), InvalidParamError, "expected entries >= 0"),
    "counts of experts": (
        lambda c: at.global_scatter(ones(3, 1), [1, 1, 1], [1, 1, 1], c),
        InvalidParamError,
        "2 cards times the number of experts",
    ),
    "rows of experts": (
        lambda c: at.global_scatter(ones(3, 1), [1, 1], [1, 1], c),
        InvalidParamError,
        "local_count sums to 2",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_of_one_rank_is_an_error_on_all(ranks: Ranks, case: str) -> None:
    def check(comm: Communicator) -> None:
        call, kind, text = MISTAKES[case]
        if comm.rank == 0:
            with pytest.raises(kind, match=text):
                call(comm)
        else:
            error = caught(lambda: at.all_to_all_v(torch.ones(4), [2, 2], [2, 2], group=comm))
            assert "rank 0" in str(error), error
        assert at.all_to_all_v(torch.ones(4), [2, 2], [2, 2], group=comm).tolist() == [1] * 4

    ranks(2)(check)


def test_the_mistakes_that_torch_knows_raise_the_same_there() -> None:
    """The texts of torch's own checks, which need no process group, hold in the installed version."""
    from torch.distributed.distributed_c10d import _ensure_all_tensors_same_dtype

    for tensors in ([ones(1), ones(1).int()], [ones(1).half(), ones(1).double(), ones(1)]):
        theirs = caught(lambda tensors=tensors: _ensure_all_tensors_same_dtype(tensors))
        ours = caught(lambda tensors=tensors: at.all_to_all(tensors, tensors, Communicator.threads(len(tensors))[0]))
        assert type(theirs) is ValueError
        assert isinstance(ours, ValueError)
        assert (
            str(theirs)[: len("Invalid usage of tensors with different dtypes")]
            == str(ours)[: len("Invalid usage of tensors with different dtypes")]
        )


#: What rank 1 does differently, and what the error names.
DISAGREEMENTS: dict[str, tuple[Callable[[Communicator], Any], str]] = {
    "counts": (lambda c: at.all_to_all_v(ones(4), [2, 2], [2, 3], group=c), "expects 3"),
    "sends": (lambda c: at.all_to_all_v(ones(4), [3, 1], [2, 1], group=c), "sends 3"),
    "dtype": (lambda c: at.all_to_all_v(ones(4).double(), [2, 2], [2, 2], group=c), "float64"),
    "operator": (lambda c: at.all_to_all_single(torch.empty(4), ones(4), group=c), "all_to_all_single"),
    "shape of rows": (lambda c: at.all_to_all_v(ones(2, 2), [1, 1], [1, 1], unit="row", group=c), "rank 1"),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_ranks_that_disagree_get_the_same_error(ranks: Ranks, case: str) -> None:
    def check(comm: Communicator) -> str:
        call, text = DISAGREEMENTS[case]
        good = lambda comm: at.all_to_all_v(ones(4), [2, 2], [2, 2], group=comm)  # noqa: E731
        error = caught(lambda: (call if comm.rank == 1 else good)(comm))
        assert isinstance(error, PeerMismatchError)
        assert text in str(error)
        assert "rank 1" in str(error)
        assert good(comm).tolist() == [1] * 4
        return str(error)

    first, second = ranks(2)(check)
    assert first == second


def test_nothing_is_written_on_disagreement(ranks: Ranks) -> None:
    def check(comm: Communicator) -> None:
        out = torch.full((1 << 16,), -1.0)
        x = torch.ones(1 << 16)
        half = 1 << 15
        with pytest.raises(PeerMismatchError):
            at.all_to_all_v(x, [half, half], [half, half - comm.rank], out=out, group=comm)
        assert out.unique().tolist() == [-1]

    ranks(2)(check)


def test_experts_that_disagree(ranks: Ranks) -> None:
    def check(comm: Communicator) -> None:
        error = caught(lambda: at.global_scatter(ones(2, 1), [1, 1], [1, 1 + comm.rank], comm))
        if comm.rank == 1:
            assert isinstance(error, PeerMismatchError)
            assert "rank 1 sends 1 rows to expert 0 of rank 1, which expects 2" in str(error)
        else:
            assert "rank 1" in str(error)

    ranks(2)(check)


def test_an_error_in_backward_is_an_error_on_all(ranks: Ranks) -> None:
    """One rank differentiates, the other does something else: both hear of it."""

    def check(comm: Communicator) -> None:
        x = torch.ones(2, requires_grad=True)
        y = at.all_to_all_v(x, [1, 1], [1, 1], group=comm)
        call = (lambda: at.functional.all_reduce(torch.ones(2), comm)) if comm.rank else y.sum().backward
        with pytest.raises(PeerMismatchError, match="all_reduce"):
            call()
        y.sum().backward()
        assert x.grad.tolist() == [1, 1]

    ranks(2)(check)


@pytest.mark.parametrize("group", ["default", 3, object()])
def test_no_group(group: Any) -> None:
    with pytest.raises(InvalidParamError, match="expected a ProcessGroup, a Communicator or None"):
        at.all_to_all_v(torch.ones(1), [1], [1], group=group)
