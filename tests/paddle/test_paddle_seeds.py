"""The examples that Paddle documents, with the results they print, and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

import alltoallv.paddle as ap
from alltoallv import Communicator
from alltoallv.testing import Ranks


def test_alltoall_single_even(ranks: Ranks) -> None:
    def check(comm: Communicator) -> list[int]:
        data = paddle.arange(2, dtype="int64") + comm.rank * 2
        output = paddle.empty([2], dtype="int64")
        task = ap.alltoall_single(data, output, group=comm)
        assert task.is_completed()
        assert task.is_sync()
        assert task.wait() is True
        return output.tolist()

    assert ranks(2)(check) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("distinct", [False, True])
def test_alltoall_single_uneven(ranks: Ranks, distinct: bool) -> None:
    """As printed, and with rows that tell each other apart, which the printed example's do not."""

    def check(comm: Communicator) -> list[list[float]]:
        rank, size = comm.rank, comm.size
        in_split_sizes = [i + 1 for i in range(size)]
        out_split_sizes = [rank + 1 for i in range(size)]
        data = paddle.ones([sum(in_split_sizes), size], dtype="float32") * rank
        if distinct:
            data = data * 10 + paddle.arange(3, dtype="float32").reshape([3, 1])
        output = paddle.empty([(rank + 1) * size, size], dtype="float32")
        task = ap.alltoall_single(data, output, in_split_sizes, out_split_sizes, sync_op=False, group=comm)
        assert not task.is_sync()
        task.wait()
        return output.tolist()

    if distinct:
        assert ranks(2)(check) == [[[0, 0], [10, 10]], [[1, 1], [2, 2], [11, 11], [12, 12]]]
    else:
        assert ranks(2)(check) == [[[0, 0], [1, 1]], [[0, 0], [0, 0], [1, 1], [1, 1]]]


ROWS = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
COUNTS = [([2, 1, 1, 1], [2, 1, 1, 1]), ([1, 1, 2, 1], [1, 1, 2, 1])]  # local_count, global_count


def _counts(rank: int) -> list[Any]:
    return [paddle.to_tensor(np.array(counts), dtype="int64") for counts in COUNTS[rank]]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_global_gather_with_gradient(ranks: Ranks, dtype: str) -> None:
    def check(comm: Communicator) -> tuple[Any, Any]:
        local_input_buf = paddle.to_tensor(ROWS, dtype=dtype, stop_gradient=False)
        a = ap.global_gather(local_input_buf, *_counts(comm.rank), group=comm)
        assert str(a.dtype) == f"paddle.{dtype}"
        c = a * a
        c.backward()
        return a.astype("float64").tolist(), local_input_buf.grad.astype("float64").tolist()

    gradient = [[2, 4], [6, 8], [10, 12], [14, 16], [18, 20]]
    assert ranks(2)(check) == [
        ([[1, 2], [3, 4], [7, 8], [1, 2], [7, 8]], gradient),
        ([[5, 6], [9, 10], [3, 4], [5, 6], [9, 10]], gradient),
    ]


def test_global_scatter_with_gradient_and_back(ranks: Ranks) -> None:
    def check(comm: Communicator) -> tuple[Any, Any]:
        x = paddle.to_tensor(ROWS, dtype="float32", stop_gradient=False)
        counts = _counts(comm.rank)
        scattered = ap.global_scatter(x, *counts, group=comm)
        assert ap.global_gather(scattered, *counts, group=comm).tolist() == ROWS
        (scattered * scattered).backward()
        return scattered.tolist(), x.grad.tolist()

    gradient = [[2, 4], [6, 8], [10, 12], [14, 16], [18, 20]]
    assert ranks(2)(check) == [
        ([[1, 2], [3, 4], [1, 2], [5, 6], [3, 4]], gradient),
        ([[7, 8], [5, 6], [7, 8], [9, 10], [9, 10]], gradient),
    ]


def test_alltoall_of_lists(ranks: Ranks) -> None:
    """Both examples of paddle.distributed.alltoall: an empty output list, and tensors of different shapes."""

    def check(comm: Communicator) -> tuple[Any, Any]:
        data = paddle.arange(1, 13).reshape([2, 2, 3]) + 12 * comm.rank
        filled: list[Any] = []
        ap.alltoall([data[0], data[1]], filled, group=comm)
        if comm.rank == 0:
            ins = [paddle.to_tensor([[1, 2, 3], [4, 5, 6]]), paddle.to_tensor([7])]
            outs = [paddle.empty([2, 3], "int64"), paddle.empty([3, 2], "int64")]
        else:
            ins = [paddle.to_tensor([[8, 9], [10, 11], [12, 13]]), paddle.to_tensor([[14, 15, 16, 17]])]
            outs = [paddle.empty([1], "int64"), paddle.empty([1, 4], "int64")]
        task = ap.alltoall(ins, outs, group=comm, sync_op=False)
        task.wait()
        return [t.tolist() for t in filled], [t.tolist() for t in outs]

    assert ranks(2)(check) == [
        (
            [[[1, 2, 3], [4, 5, 6]], [[13, 14, 15], [16, 17, 18]]],
            [[[1, 2, 3], [4, 5, 6]], [[8, 9], [10, 11], [12, 13]]],
        ),
        ([[[7, 8, 9], [10, 11, 12]], [[19, 20, 21], [22, 23, 24]]], [[7], [[14, 15, 16, 17]]]),
    ]
