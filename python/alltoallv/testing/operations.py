"""Checks ATB's operations with the tensors of any framework: one check for all of them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import alltoallv
from alltoallv import AllToAllVOperation, AllToAllVParam, Communicator, QuantAllReduceOperation, QuantAllReduceParam
from alltoallv.errors import AllToAllVError
from alltoallv.extras import extra
from alltoallv.quantization.feedback import Feedback
from alltoallv.testing import quantized, reference
from alltoallv.testing.golden import assert_bits_equal

ml_dtypes = extra("ml_dtypes", "testing")

Array = npt.NDArray[Any]
_DTYPES = ("float16", "float32", "int8", "int16", "int32", "int64", ml_dtypes.bfloat16)


def check_operations(
    comm: Communicator,
    front_end: ModuleType,
    tensor: Callable[[Array], Any],
    array: Callable[[Any], Array],
    feedback: Feedback[Any],
) -> None:
    """Checks on every rank of ``comm`` the results' kind and bits, and which code all ranks get for refused calls.

    Args:
        tensor, array: Convert a NumPy array, bfloat16 too, to the framework's tensor on the CPU, and back.
        feedback: A new error feedback for such tensors.
    """
    assert front_end.AllToAllVOperation is alltoallv.AllToAllVOperation
    assert front_end.QuantAllReduceOperation is alltoallv.QuantAllReduceOperation
    _exchange(comm, tensor, array)
    _reduce(comm, tensor, array, feedback)


def _exchange(comm: Communicator, tensor: Callable[[Array], Any], array: Callable[[Any], Array]) -> None:
    rank, size = comm.rank, comm.size
    counts = np.random.default_rng(size).integers(0, 5, (size, size)) + np.eye(size, dtype=np.int64)
    sends, recvs = counts[rank].tolist(), counts[:, rank].tolist()
    displs = [np.cumsum([0, *n])[:-1].tolist() for n in (sends, recvs)]
    param = AllToAllVParam(
        rank=rank, rank_size=size, send_counts=sends, sdispls=displs[0], recv_counts=recvs, rdispls=displs[1]
    )
    operation = AllToAllVOperation(param, comm)
    for dtype in _DTYPES:
        inputs = [(np.arange(n) + 10 * j).astype(dtype) for j, n in enumerate(counts.sum(1))]
        expected = reference.all_to_all_v(inputs, counts)[rank].reshape(1, -1)
        x = tensor(inputs[rank])
        y = operation(x)
        assert type(y) is type(x)
        assert y.dtype == x.dtype
        assert_bits_equal(array(y), expected)
        out = tensor(np.zeros_like(expected))
        assert operation(x, out=out) is out
        assert_bits_equal(array(out), expected)
    x = tensor(inputs[rank].astype(np.float32))
    wrong = [
        ((array(x).tolist(), None), 5, "x is a list, expected a NumPy array or a tensor of torch, MindSpore or Paddle"),
        ((tensor(array(x).astype(np.float64)), None), 13, "float64"),
        ((x, array(y).tolist()), 5, "out is a list, expected a.*, as x"),
        ((x, tensor(np.zeros((1, sum(recvs)), np.int32))), 13, "the dtype of the output is int32, expected float32"),
        ((x, tensor(np.zeros((sum(recvs), 2), np.float32)).T[:1]), 1, "out is not contiguous and writable"),
        ((x, tensor(np.zeros((1, sum(recvs) + 1), np.float32))), 8, "the output has shape"),
        ((tensor(array(x)[:0]), None), 9, "expected positive dimensions"),
        ((tensor(array(x).reshape(-1, *[1] * 8)), None), 8, "9 dimensions, expected 1 to 8"),
        ((tensor(array(x)[:1]), None), 1, "expected at most 1, the elements of the input"),
    ]
    for (given, target), code, message in wrong:
        with pytest.raises(AllToAllVError, match=message) as caught:
            _ = operation(given, out=target) if rank == 0 else operation(x)
        assert caught.value.code == code, message
    assert_bits_equal(array(operation(x)), expected.astype(np.float32))


def _reduce(
    comm: Communicator, tensor: Callable[[Array], Any], array: Callable[[Any], Array], feedback: Feedback[Any]
) -> None:
    rank, size = comm.rank, comm.size
    rng = np.random.default_rng(1)
    param = QuantAllReduceParam(rank=rank, rank_size=size)
    operation = QuantAllReduceOperation(param, comm)
    codes = [rng.integers(-100, 101, (5, 32)).astype(np.int8) for _ in range(size)]
    scale, offset = (rng.uniform(-1, 1, 1).astype(np.float16) for _ in range(2))
    given = tensor(codes[rank]), tensor(scale), tensor(offset)
    wanted = quantized.shared_scale_all_reduce(codes, scale, float(offset[0]))[0]
    for out in (None, tensor(np.zeros_like(wanted))):
        y = operation(*given, out=out)
        assert type(y) is type(given[0])
        assert out is None or y is out
        assert_bits_equal(array(y), wanted)
    for change, code, message in (
        ((given[0], scale.tolist(), given[2]), 5, "scale is a list, expected a.*, as x"),
        ((tensor(codes[rank].astype(np.float32)), *given[1:]), 13, "float32"),
        ((tensor(codes[rank][:, :8]), *given[1:]), 8, "multiple of 16"),
    ):
        with pytest.raises(AllToAllVError, match=message) as caught:
            operation(*(change if rank == 0 else given))
        assert caught.value.code == code, message
    dynamic = QuantAllReduceOperation(
        QuantAllReduceParam(rank=rank, rank_size=size, quant_type=16, gather="quantized"), comm
    )
    errors, gather_error = [np.zeros(1500, np.float32) for _ in range(size)], np.zeros(1500, np.float32)
    for _ in range(2):
        xs = [rng.normal(size=1500).astype(np.float32) for _ in range(size)]
        wanted = quantized.quantized_all_reduce(xs, gather="quantized", errors=errors, gather_error=gather_error)[rank]
        assert_bits_equal(array(dynamic(tensor(xs[rank]), error_feedback=feedback)), wanted)
