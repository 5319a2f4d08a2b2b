"""The functions of mint.distributed: lists of tensors, gradients, errors."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

import alltoallv.mindspore as am
from alltoallv import Communicator
from alltoallv._calls.regions import as_bytes
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.mindspore.tensors import DTYPES, empty, region, settle
from alltoallv.testing import golden, reference

COUNTS = [2, 5]  # rows that each rank gives or gets


def inputs_of(name: str, rows: list[int]) -> list[np.ndarray]:
    random = np.random.default_rng(7)
    return [random.integers(0, 3, (n, 2)).astype(golden.dtype_of(name)) for n in rows]


def to_tensor(array: np.ndarray) -> Tensor:
    tensor = empty(array.shape, next(dtype for dtype, name in DTYPES.items() if name == array.dtype.name))
    as_bytes(region(tensor))[...] = np.frombuffer(array.tobytes(), np.uint8)
    return tensor


def same(tensor: Tensor, expected: np.ndarray) -> bool:
    settle()
    return as_bytes(region(tensor)).tobytes() == expected.tobytes()


def finished(call, *args, async_op: bool) -> None:
    handle = call(*args, async_op=async_op)
    assert (handle is not None) == async_op
    if async_op:
        handle.wait()


def check_lists_of_tensors(comm: Communicator) -> None:
    """Uneven ones; tests/matrix has the rest."""
    r, size = comm.rank, comm.size
    for number, name in enumerate(("float32", "bfloat16", "int64")):
        later, uneven = bool(number % 2), inputs_of(name, COUNTS)
        outs = [to_tensor(np.ones_like(x)) for x in uneven]
        finished(am.all_gather, outs, to_tensor(uneven[r]), comm, async_op=later)
        assert all(map(same, outs, uneven)), name
        whole = inputs_of(name, [7] * size)
        parts = [to_tensor(part) for part in np.split(whole[r], [COUNTS[0]])]
        out = to_tensor(np.ones_like(uneven[r]))
        finished(am.reduce_scatter, out, parts, "max", comm, async_op=later)
        assert same(out, reference.reduce_scatter(whole, "max", COUNTS)[r]), name
    finished(am.barrier, comm, async_op=False)
    finished(am.barrier, comm, async_op=True)


def check_gradients_of_distributed_functions(comm: Communicator) -> None:
    """Each rank weighs what it gets with rank + 1; the weights of all ranks sum to 3."""
    r, x = comm.rank, Tensor(np.array([1.0, 2.0], np.float32))

    def gathered(x: Tensor) -> Tensor:
        outs = [ops.zeros(2), ops.zeros(2)]
        am.all_gather(outs, x * x, comm)
        return (outs[0] + outs[1]).sum() * (r + 1)

    def scattered(x: Tensor) -> Tensor:
        out = ops.zeros(1)
        am.reduce_scatter_tensor(out, x * x, group=comm)
        return out.sum() * (r + 1)

    def listed(x: Tensor) -> Tensor:
        out, y = ops.zeros(2), x * x
        am.reduce_scatter(out, [y, y * 2], group=comm)
        return out.sum() * (r + 1)

    def sent(x: Tensor) -> Tensor:
        y = x * x
        am.broadcast(y, 0, comm)
        return y.sum() * (r + 1)

    for function, expected in (
        (gathered, [6, 12]),
        (scattered, [2, 8]),
        (listed, [10, 20]),
        (sent, [0, 0] if r else [6, 12]),
    ):
        np.testing.assert_array_equal(ms.grad(function)(x).asnumpy(), np.float32(expected), function.__name__)
    curve = ms.grad(lambda x: ms.grad(sent)(x).sum())(x)
    np.testing.assert_array_equal(curve.asnumpy(), np.float32([0, 0] if r else [6, 6]))


def check_errors_of_distributed_functions(comm: Communicator) -> None:
    for call, kind, text in (
        (lambda: am.all_gather([ops.ones(2)], ops.ones(2), comm), InvalidParamError, "tensor_list has 1 tensors"),
        (lambda: am.all_gather(ops.ones(4), ops.ones(2), comm), TypeError, "Expected list or tuple"),
        (lambda: am.reduce_scatter(ops.ones(3), [ops.ones(2)] * 2, group=comm), InvalidTensorError, "has 3 elements"),
        (lambda: am.reduce_scatter_tensor(ops.ones(2), ops.ones(3), group=comm), InvalidTensorError, "2 times the 2"),
        (lambda: am.all_reduce(ops.ones(2), "mean", comm), InvalidParamError, "mean"),
        (lambda: am.broadcast(ops.ones(2), 2, comm), InvalidParamError, "root is 2, expected 0 <= root < 2"),
        (lambda: am.broadcast([1.0], 0, comm), TypeError, "Expected tensor"),
        (lambda: am.barrier(comm, 1), TypeError, "'async_op' must be a bool"),
    ):
        with pytest.raises(kind, match=text):
            call()
    am.barrier(comm)
