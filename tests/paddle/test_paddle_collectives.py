"""Lists of tensors, errors and groups of the functions with paddle.distributed's signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from on_ranks import on_ranks
from paddle.distributed import ReduceOp
from paddle_arrays import filled, inputs_of, same, to_paddle

import alltoallv.paddle as ap
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.testing import reference

COUNTS = [2, 0, 5]  # rows that each rank gives or gets


@pytest.mark.parametrize("size", [1, 3])
@on_ranks()
def test_lists_of_tensors(comm: Communicator, size: int) -> None:
    """Uneven ones, and empty ones that are filled; tests/matrix has the rest."""
    r, counts = comm.rank, COUNTS[:size]
    for number, dtype in enumerate(("float32", "bfloat16", "int64")):
        later: dict[str, Any] = {"group": comm, "sync_op": bool(number % 2)}
        uneven, even = inputs_of(dtype, counts), inputs_of(dtype, [size] * size)
        outs, made, told = [filled(n, dtype) for n in counts], [], []
        assert ap.all_gather(outs, to_paddle(uneven[r]), **later).wait()
        assert all(map(same, outs, uneven)), dtype
        assert ap.all_gather(made, to_paddle(even[r]), **later).wait()
        assert all(map(same, made, even)), dtype
        assert ap.alltoall(told, [to_paddle(even[r])] * size, **later).wait()
        assert all(map(same, told, even)), dtype
        whole = inputs_of(dtype, [sum(counts)] * size)
        out, parts = filled(counts[r], dtype), np.split(whole[r], np.cumsum(counts)[:-1])
        assert ap.reduce_scatter(out, [to_paddle(part) for part in parts], ReduceOp.MAX, **later).wait()
        assert same(out, reference.reduce_scatter(whole, "max", counts)[r]), dtype


PARAM, TENSOR = InvalidParamError, InvalidTensorError


def ones(n: int) -> paddle.Tensor:
    return paddle.ones([n])


ERRORS: list[tuple[Callable[[Communicator], Any], type[Exception], str]] = [
    (lambda c: ap.all_gather([ones(2)] * 3, ones(2), c), PARAM, "tensor_list has 3 tensors, expected 2"),
    (lambda c: ap.all_gather(ones(3), ones(2), c), TENSOR, "tensor_list has 3 elements, expected 2 times the 2"),
    (lambda c: ap.all_gather([ones(1), ones(1)], ones(2), c), TENSOR, "tensor has 2 elements, expected the 1"),
    (lambda c: ap.all_gather(None, ones(2), c), TypeError, "tensor_list is a NoneType"),
    (lambda c: ap.all_reduce(ones(2), "sum", c), PARAM, "op is 'sum', expected a paddle.distributed.ReduceOp"),
    (lambda c: ap.all_reduce([1.0], group=c), TypeError, "tensor is a list"),
    (lambda c: ap.reduce_scatter(ones(3), [ones(2), ones(2)], group=c), TENSOR, "tensor has 3 elements, expected"),
    (lambda c: ap.reduce_scatter(ones(2), ones(3), group=c), TENSOR, "the input has 3 elements, expected 2 times"),
]


@on_ranks(2)
def test_errors_leave_the_communicator_usable(comm: Communicator) -> None:
    for call, kind, text in ERRORS:
        with pytest.raises(kind, match=text):
            call(comm)
    ap.barrier(comm)
