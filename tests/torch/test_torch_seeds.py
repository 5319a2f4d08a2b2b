"""The examples that PyTorch and Paddle document, with the results they print."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.testing import Ranks


def test_torch_even(ranks: Ranks) -> None:
    def check(comm: Communicator) -> list[Tensor]:
        rank = comm.rank
        input = torch.arange(4) + rank * 4
        input = list(input.chunk(4))
        output = list(torch.empty([4], dtype=torch.int64).chunk(4))
        assert at.all_to_all(output, input, group=comm) is None
        return output

    printed = """[tensor([0]), tensor([4]), tensor([8]), tensor([12])]     # Rank 0
                 [tensor([1]), tensor([5]), tensor([9]), tensor([13])]     # Rank 1
                 [tensor([2]), tensor([6]), tensor([10]), tensor([14])]    # Rank 2
                 [tensor([3]), tensor([7]), tensor([11]), tensor([15])]    # Rank 3"""
    _compare(ranks(4)(check), printed)


def test_torch_even_is_like_scatters(ranks: Ranks) -> None:
    """The documentation's second example: rank i scatters its list, for every i."""

    def check(comm: Communicator) -> None:
        inputs = [list((torch.arange(4) + rank * 4).chunk(4)) for rank in range(4)]
        scattered = [inputs[i][comm.rank] for i in range(4)]
        output = list(torch.empty([4], dtype=torch.int64).chunk(4))
        at.all_to_all(output, inputs[comm.rank], group=comm)
        assert all(map(torch.equal, output, scattered))

    ranks(4)(check)


def test_torch_uneven(ranks: Ranks) -> None:
    def check(comm: Communicator) -> list[Tensor]:
        rank = comm.rank
        input = torch.arange([6, 9, 5, 7][rank]) + 10 * rank
        input_splits = [[2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1]][rank]
        output_splits = [[2, 3, 2, 2], [2, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 1]][rank]
        output = [torch.empty(n, dtype=torch.int64) for n in output_splits]
        at.all_to_all(output, list(input.split(input_splits)), group=comm)
        single = torch.empty(sum(output_splits), dtype=torch.int64)
        at.all_to_all_single(single, input, output_splits, input_splits, group=comm)
        assert torch.equal(single, torch.cat(output))
        return output

    printed = """[tensor([0, 1]), tensor([10, 11, 12]), tensor([20, 21]), tensor([30, 31])]     # Rank 0
                 [tensor([2, 3]), tensor([13, 14]), tensor([22]), tensor([32, 33])]             # Rank 1
                 [tensor([4]), tensor([15, 16]), tensor([23]), tensor([34, 35])]                # Rank 2
                 [tensor([5]), tensor([17, 18]), tensor([24]), tensor([36])]                    # Rank 3"""
    _compare(ranks(4)(check), printed)


def test_torch_complex(ranks: Ranks) -> None:
    """As printed the output is of int64, for which torch raises; with the input's dtype the printed result comes."""

    def check(comm: Communicator) -> list[Tensor]:
        rank = comm.rank
        input = torch.tensor([1 + 1j, 2 + 2j, 3 + 3j, 4 + 4j], dtype=torch.cfloat) + 4 * rank * (1 + 1j)
        input = list(input.chunk(4))
        output = list(torch.empty([4], dtype=torch.int64).chunk(4))
        with pytest.raises(ValueError, match="Invalid usage of tensors with different dtypes"):
            at.all_to_all(output, input, group=comm)
        output = list(torch.empty([4], dtype=torch.cfloat).chunk(4))
        at.all_to_all(output, input, group=comm)
        return output

    printed = """[tensor([1+1j]), tensor([5+5j]), tensor([9+9j]), tensor([13+13j])]      # Rank 0
                 [tensor([2+2j]), tensor([6+6j]), tensor([10+10j]), tensor([14+14j])]    # Rank 1
                 [tensor([3+3j]), tensor([7+7j]), tensor([11+11j]), tensor([15+15j])]    # Rank 2
                 [tensor([4+4j]), tensor([8+8j]), tensor([12+12j]), tensor([16+16j])]    # Rank 3"""
    _compare(ranks(4)(check), printed)


def _compare(results: list[list[Tensor]], printed: str) -> None:
    for tensors, line in zip(results, printed.splitlines(), strict=True):
        text = line.split("#")[0].strip().replace("tensor(", "").replace(")", "")
        expected = ast.literal_eval(text)
        assert [tensor.tolist() for tensor in tensors] == expected


def test_paddle_alltoall_single_even(ranks: Ranks) -> None:
    def check(comm: Communicator) -> list[int]:
        data = torch.arange(2) + comm.rank * 2
        output = torch.empty(2, dtype=torch.int64)
        at.all_to_all_single(output, data, group=comm)
        return output.tolist()

    assert ranks(2)(check) == [[0, 2], [1, 3]]


def test_paddle_alltoall_single_uneven(ranks: Ranks) -> None:
    def check(comm: Communicator) -> list[list[float]]:
        rank, size = comm.rank, comm.size
        in_split_sizes = [i + 1 for i in range(size)]
        out_split_sizes = [rank + 1 for i in range(size)]
        data = torch.ones(sum(in_split_sizes), size, dtype=torch.float32) * rank
        output = torch.empty((rank + 1) * size, size, dtype=torch.float32)
        task = at.all_to_all_single(output, data, out_split_sizes, in_split_sizes, group=comm, async_op=True)
        task.wait()
        return output.tolist()

    assert ranks(2)(check) == [[[0, 0], [1, 1]], [[0, 0], [0, 0], [1, 1], [1, 1]]]


_PADDLE = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
_COUNTS = [([2, 1, 1, 1], [2, 1, 1, 1]), ([1, 1, 2, 1], [1, 1, 2, 1])]  # local_count, global_count


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_paddle_global_gather_with_gradient(ranks: Ranks, kind: Any) -> None:
    def check(comm: Communicator) -> tuple[Any, Any]:
        local_input_buf = torch.tensor(_PADDLE, dtype=torch.float32, requires_grad=True)
        local_count, global_count = map(kind, _COUNTS[comm.rank])
        a = at.global_gather(local_input_buf, local_count, global_count, group=comm)
        c = a * a
        c.backward(torch.ones_like(c))
        return a.tolist(), local_input_buf.grad.tolist()

    gradient = [[2, 4], [6, 8], [10, 12], [14, 16], [18, 20]]
    assert ranks(2)(check) == [
        ([[1, 2], [3, 4], [7, 8], [1, 2], [7, 8]], gradient),
        ([[5, 6], [9, 10], [3, 4], [5, 6], [9, 10]], gradient),
    ]


def test_paddle_global_scatter_and_back(ranks: Ranks) -> None:
    def check(comm: Communicator) -> Any:
        x = torch.tensor(_PADDLE, dtype=torch.float32, requires_grad=True)
        scattered = at.global_scatter(x, *_COUNTS[comm.rank], group=comm)
        assert torch.equal(at.global_gather(scattered, *_COUNTS[comm.rank], group=comm), x)
        (scattered * scattered).sum().backward()
        assert torch.equal(x.grad, 2 * x)
        return scattered.tolist()

    assert ranks(2)(check) == [
        [[1, 2], [3, 4], [1, 2], [5, 6], [3, 4]],
        [[7, 8], [5, 6], [7, 8], [9, 10], [9, 10]],
    ]
