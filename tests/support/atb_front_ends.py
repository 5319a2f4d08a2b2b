"""Checks ATB's operations with the tensors of any framework: one check for all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import alltoallv
from alltoallv import (
    AllToAllVOperation,
    AllToAllVParam,
    Communicator,
    QuantAllReduceOperation,
    QuantAllReduceParam,
    QuantType,
)
from alltoallv.errors import AllToAllVError, InvalidParamError, PeerMismatchError
from alltoallv.extras import extra
from alltoallv.quantization.requests import Feedback
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
    check_quantized(comm, tensor, array, feedback)


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
    for timeout in (-5, 0, "soon"):
        with pytest.raises(InvalidParamError, match=rf"timeout is {timeout!r}, expected seconds above 0.*A2A-1055"):
            operation(x, timeout=timeout if rank == 0 else None)
    assert_bits_equal(array(operation(x)), expected.astype(np.float32))


def check_quantized(
    comm: Any, tensor: Callable[[Array], Any], array: Callable[[Any], Array], feedback: Feedback[Any]
) -> None:
    """Checks `QuantAllReduceOperation` alone; the arguments are as in `check_operations`."""
    rank, size = comm.rank, comm.size
    rng = np.random.default_rng(1)
    for kind, channels in ((QuantType.PER_CHANNEL, 48), (QuantType.PER_TENSOR, 1)):
        operation = QuantAllReduceOperation(QuantAllReduceParam(rank=rank, rank_size=size, quant_type=kind), comm)
        for shape in ((2, 3, 48), (135, 48)):
            codes = [rng.integers(-128, 128, shape).astype(np.int8) for _ in range(size)]
            scale = rng.uniform(-1, 1, channels).astype(np.float16)
            offset = rng.uniform(-1, 1, 1).astype(np.float16)
            given = tensor(codes[rank]), tensor(scale), tensor(offset)
            wanted = quantized.shared_scale_all_reduce(codes, scale, float(offset[0]))[0]
            for out in (None, tensor(np.zeros_like(wanted))):
                y = operation(*given, out=out)
                assert type(y) is type(given[0])
                assert out is None or y is out
                assert_bits_equal(array(y), wanted)
    elsewhere = QuantAllReduceOperation(QuantAllReduceParam(rank=0, rank_size=size + 1), comm)
    for made, change, code, message in (
        (operation, (given[0], scale.tolist(), given[2]), 5, "scale is a list, expected a.*, as x"),
        (operation, (tensor(codes[rank].astype(np.float32)), *given[1:]), 13, "float32"),
        (operation, (tensor(codes[rank][:, :8]), *given[1:]), 8, "multiple of 16"),
        (partial(operation, out=tensor(wanted[1:])), given, 8, r"output has shape \[134, 48\], expected \[135, 48\]"),
        (partial(operation, timeout=-5), given, 1, "timeout is -5, expected seconds above 0"),
        (elsewhere, given, 1, f"rank and rank_size are 0 and {size + 1}, expected 0 and {size}"),
    ):
        with pytest.raises(AllToAllVError, match=message) as caught:
            _ = made(*change) if rank == 0 else operation(*given)
        assert caught.value.code == code, message
    if size > 1:
        with pytest.raises(PeerMismatchError, match=r"rank 0 has scale 0, rank 1 has scale 1.*A2A-3009"):
            operation(given[0], tensor(np.full(1, rank, np.float16)), given[2])
    dynamic = QuantAllReduceOperation(
        QuantAllReduceParam(rank=rank, rank_size=size, quant_type=QuantType.DYNAMIC, gather="quantized"), comm
    )
    errors, gather_error = [np.zeros(1500, np.float32) for _ in range(size)], np.zeros(1500, np.float32)
    for _ in range(2):
        xs = [rng.normal(size=1500).astype(np.float32) for _ in range(size)]
        wanted = quantized.quantized_all_reduce(xs, gather="quantized", errors=errors, gather_error=gather_error)[rank]
        assert_bits_equal(array(dynamic(tensor(xs[rank]), error_feedback=feedback)), wanted)
