"""Quantized reductions on emulated NPUs: NumPy's bits with a shared scale, else the bits of the CPU's kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from atb_front_ends import check_quantized
from npu_ranks import bits, communicator, group, on
from on_ranks import on_ranks
from torch import Tensor

import alltoallv.torch as at
from alltoallv import Communicator, QuantAllReduceParam
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError, ValueOverflowError
from alltoallv.testing import quantized as reference
from alltoallv.testing.golden import assert_bits_equal
from alltoallv.torch.engines import torch_kernels
from alltoallv.torch.engines.kernels import kernels_for


@on_ranks(2, communicator=False)
def test_shared_scale_over_a_group(rank: int, size: int, file: str) -> None:
    rng = np.random.default_rng(0)
    with group(rank, size, file) as (_, device):
        for numel in (1, 1000, 5003):
            arrays = [rng.integers(-128, 128, numel, np.int8) for _ in range(size)]
            y = at.quantized_all_reduce(on(device, arrays[rank]), scale=0.0125)
            assert y.device == device
            total = np.sum([x.astype(np.int32) for x in arrays], axis=0, dtype=np.int32)
            expected = (total.astype(np.float32) * np.float32(0.0125)).astype(np.float16)
            assert_bits_equal(bits(y), expected)
        x = torch.from_numpy(rng.standard_normal(3000).astype(np.float32)).to(device)  # the same on all ranks
        y = at.quantized_all_reduce(x)
        assert float((y.cpu() - size * x.cpu()).abs().max()) < 0.05 * size


def normal(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def codes(rank: int, *shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(rank), dtype=torch.int8)


Reduce = Callable[[Tensor, Any], Tensor]  # of an input and a communicator

CASES: list[tuple[str, Callable[[int], Tensor], Reduce]] = [
    ("shared scale", lambda r: codes(r, 5003), lambda x, c: at.quantized_all_reduce(x, scale=0.0125, group=c)),
    (
        "shared scales of channels",
        lambda r: codes(r, 30, 48),
        lambda x, c: at.quantized_all_reduce(
            x, scale=torch.linspace(-1, 1, 48), offset=2.5, out_dtype=torch.bfloat16, group=c
        ),
    ),
    (
        "two scales",
        lambda r: normal(r, 4097),
        lambda x, c: at.quantized_all_reduce(x, comm_quant_scale_1=0.03, comm_quant_scale_2=0.05, group=c),
    ),
    ("dynamic", lambda r: normal(r, 5003), lambda x, c: at.quantized_all_reduce(x, group=c)),
    (
        "4 bits, quantized twice",
        lambda r: normal(r, 3001, torch.float16),
        lambda x, c: at.quantized_all_reduce(x, bits=4, group_size=32, gather="quantized", op="avg", group=c),
    ),
    (
        "error feedback",
        lambda r: normal(r, 3001),
        lambda x, c: at.quantized_all_reduce(x, gather="quantized", error_feedback=at.ErrorFeedback(), group=c),
    ),
    ("reduce-scatter", lambda r: normal(r, 600).view(20, 30), lambda x, c: at.quantized_reduce_scatter(x, group=c)),
    ("empty", lambda r: normal(r, 0), lambda x, c: at.quantized_all_reduce(x, group=c)),
    ("one element", lambda r: normal(r, 1), lambda x, c: at.quantized_all_reduce(x, group=c)),
]


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(communicator=False)
def test_over_a_communicator_the_bits_are_those_of_the_cpu(rank: int, size: int) -> None:
    with communicator(rank) as (npus, _), Communicator.from_env("host", backend="shm", timeout=30) as host:
        for name, make, call in CASES:
            x = make(rank)
            wanted = call(x, host)
            y = call(x.to(f"npu:{rank}"), npus)
            assert y.device == torch.device(f"npu:{rank}")
            assert (y.shape, y.dtype) == (wanted.shape, wanted.dtype)
            assert_bits_equal(bits(y), bits(wanted), name)


@on_ranks(2, communicator=False)
def test_bounds_are_those_of_the_cpu(rank: int, size: int) -> None:
    with communicator(rank) as (npus, device), Communicator.from_env("host", backend="shm", timeout=30) as host:
        x = normal(rank, 3010)
        for how in (
            {"bound": True},
            {"bound": True, "bits": 4, "gather": "quantized", "op": "avg"},
            {"max_error": 1.0},
        ):
            wanted = at.quantized_all_reduce(x, group=host, out_dtype=torch.float16, **how)
            output, bound, taken = at.quantized_all_reduce(x.to(device), group=npus, out_dtype=torch.float16, **how)
            assert taken == wanted.format
            assert bound.device == device
            assert_bits_equal(bits(output), bits(wanted.output), str(how))
            assert_bits_equal(bits(bound), bits(wanted.bound), str(how))
        rows, ones = x.view(2 * 5, 301), [5, 5]
        wanted = at.quantized_all_to_all(rows, ones, bound=True, group=host)
        assert_bits_equal(
            bits(at.quantized_all_to_all(rows.to(device), ones, bound=True, group=npus).bound), bits(wanted.bound)
        )


def dispatch(comm: Any, device: torch.device, rank: int, size: int) -> None:
    """Rows from ``device``, with counts that are told and learnt, at once and later: the oracle's bits."""
    sends = [[(3 * r + 2 * j) % 5 for j in range(size)] for r in range(size)]
    for tail, bits_, group_size in (((48,), 8, None), ((5, 7), 4, 9), ((0,), 8, None)):
        arrays = [normal(r, sum(row) * int(np.prod(tail))).view(sum(row), *tail).numpy() for r, row in enumerate(sends)]
        how = {"bits": bits_, "group_size": group_size}
        wanted = reference.quantized_all_to_all(arrays, sends, dtype="float16", **how)[rank]
        x, recvs = on(device, arrays[rank]), [row[rank] for row in sends]
        for known in (recvs, None):
            told = how | {"out_dtype": torch.float16, "group": comm}
            rows = at.quantized_all_to_all(x, sends[rank], known, **told)
            assert rows.device == device
            assert_bits_equal(bits(rows), wanted.reshape(rows.shape))
            _, work = at.quantized_all_to_all(x, sends[rank], known, async_op=True, **told)
            assert_bits_equal(bits(work.result()), wanted.reshape(rows.shape))
    at.barrier(comm)  # a refusal may end the communicator, and with it what a slower rank still waits for
    large = torch.full((size, 64), 7e4).to(device)
    with pytest.raises(ValueOverflowError):
        at.quantized_all_to_all(large, [1] * size, overflow="raise", out_dtype=torch.float16, group=comm)


def overflows(comm: Communicator, device: torch.device) -> None:
    large = torch.full((100,), 6e4).to(device)
    with pytest.raises(ValueOverflowError):
        at.quantized_all_reduce(large, out_dtype=torch.float16, overflow="raise", group=comm)


@pytest.mark.parametrize("size", [2, 3])
@on_ranks(communicator=False)
def test_rows_travel_as_codes(rank: int, size: int, file: str) -> None:
    """Over a communicator and over a group."""
    with communicator(rank, check="always") as (comm, device):
        dispatch(comm, device, rank, size)
        x = normal(rank, 64 * size).view(size, 64).to(device)
        ones = [1] * size
        with pytest.raises(PeerMismatchError):
            at.quantized_all_to_all(x, ones, bits=8 if rank else 4, group=comm)
        x.requires_grad_()
        at.quantized_all_to_all(x, ones, ones, group=comm).sum().backward()
        assert x.grad is not None
        assert x.grad.eq(1).all()
    with group(rank, size, file) as (own, device):
        dispatch(own, device, rank, size)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
@on_ranks(2, communicator=False, fresh=True, preloaded=False, env={"TRITON_INTERPRET": "1"})
def test_triton_kernels_interpreted_on_the_tensors(rank: int, size: int, step: int) -> None:
    """In place of torch's operators, which must not be used then."""
    from alltoallv_emulator.kernels import InterpretedKernels

    with communicator(rank) as (npus, device), Communicator.from_env("host", backend="shm", timeout=30) as host:
        kernels = kernels_for("npu")
        assert isinstance(kernels, InterpretedKernels)
        for name in ("quantize", "dequantize_sum", "dequantize", "requantize", "sum_shared_scale"):
            assert getattr(torch_kernels, name)
            setattr(torch_kernels, name, None)
        for name, make, call in CASES[::step]:
            x = make(rank)
            wanted, y = call(x, host), call(x.to(device), npus)
            assert y.device == device
            assert_bits_equal(bits(y), bits(wanted), name)
        overflows(npus, device)


@on_ranks(2, communicator=False)
def test_states_of_error_feedback_are_those_of_the_cpu(rank: int, size: int) -> None:
    with communicator(rank) as (npus, device), Communicator.from_env("host", backend="shm", timeout=30) as host:
        states = {}
        for comm, place in ((host, "cpu"), (npus, str(device))):
            feedback = states[place] = at.ErrorFeedback()
            for step in range(3):
                x = normal(10 * step + rank, 1000).to(place)
                at.quantized_all_reduce(x, gather="quantized", bits=4, error_feedback=feedback, group=comm)
        there, here = states[str(device)].state_dict(), states["cpu"].state_dict()
        assert there.keys() == here.keys()
        for key, value in here.items():
            if isinstance(value, Tensor):
                assert_bits_equal(bits(there[key]), bits(value), key)


@on_ranks(2, communicator=False)
def test_disagreement_and_overflows_are_errors_on_all(rank: int, size: int) -> None:
    with communicator(rank, check="always") as (comm, device):
        x = codes(rank, 64).to(device)
        with pytest.raises(PeerMismatchError, match=r"rank 0 has scale 0\.25, rank 1 has scale 0\.5"):
            at.quantized_all_reduce(x, scale=0.5 if rank else 0.25, group=comm)
        y = normal(rank, 64).to(device)
        with pytest.raises(PeerMismatchError, match="rank 0 has format int4, rank 1 has format int8"):
            at.quantized_all_reduce(y, bits=8 if rank else 4, group=comm)
        overflows(comm, device)
        with pytest.raises(InvalidParamError, match="group_size"):
            at.quantized_all_reduce(y, group_size=0 if rank else 128, group=comm)
        at.quantized_all_reduce(y, group=comm)
        assert comm.usable


@on_ranks(2, communicator=False)
def test_the_operation_of_atb(rank: int, size: int) -> None:
    """As in every front end; also with the communicator that the param describes."""
    with communicator(rank, check="always") as (comm, device):
        check_quantized(comm, lambda array: on(device, array), bits, at.ErrorFeedback())
        param, given = QuantAllReduceParam(rank=rank, rank_size=size), (codes(0, 4, 16), *torch.ones(2, 1).half())
        there = [x.to(device) for x in given]
        assert torch.equal(at.QuantAllReduceOperation(param)(*there), at.QuantAllReduceOperation(param, comm)(*there))
        with pytest.raises(InvalidTensorError, match="expected npu"):
            at.QuantAllReduceOperation(param, comm)(*given)
