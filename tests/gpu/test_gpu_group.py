"""CUDA tensors: NCCL on one rank, gloo on ranks that share a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from backend_groups import Grouped, on_group
from engine_groups import DTYPES, random_cases, run_case, to_numpy, to_torch
from one_gpu import on_gpu
from test_quantized_engine import every_case, operation_cases, rows_cases

import alltoallv.torch as at
from alltoallv import AllToAllVParam, QuantAllReduceParam, QuantType
from alltoallv.errors import InvalidTensorError, PeerMismatchError
from alltoallv.testing import golden, reference
from alltoallv.torch.engines.nccl import FIRST


def gradients() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.arange(2.0 * size, device="cuda").requires_grad_()
    out = at.all_to_all_v(x, [2] * size, [2] * size)
    (out * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [float(j + 1) for j in range(size) for _ in range(2)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return at.all_to_all_v(x * 2, [2] * size, [2] * size) + 1

    assert step(x.detach()).tolist() == (at.all_to_all_v(x.detach() * 2, [2] * size, [2] * size) + 1).tolist()
    counts = [1] * size
    rows = at.global_scatter(x.detach().view(-1, 2), counts, counts)
    assert torch.equal(at.global_gather(rows, counts, counts), x.detach().view(-1, 2))


def test_nccl_alone(grouped: Grouped) -> None:
    """World size 1 honours displacements; nothing waits for the GPU when counts are lists."""

    def run(rank: int, size: int, comm: Any, cases: list[golden.Case]) -> None:
        assert comm.backend == "nccl"
        assert at.from_group(comm.group).backend == "shm"
        for number, case in enumerate(cases):
            run_case(comm, case, number, "cuda")
        gradients()
        for name in DTYPES:
            x = torch.arange(5).to(getattr(torch, name)).cuda()
            gathered = torch.empty_like(x)
            at.all_gather_into_tensor(gathered, x)
            golden.assert_bits_equal(to_numpy(gathered.cpu()), to_numpy(x.cpu()), name)
        x, out = torch.ones(4, device="cuda"), torch.empty(4, device="cuda")
        assert comm.stats()["operators"] > FIRST
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            at.all_to_all_v(x, [4], [4], out=out)
            at.all_to_all_single(out, x)
            at.all_to_all([out], [x])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert out.tolist() == [1, 1, 1, 1]
        with pytest.raises(InvalidTensorError, match="expected one device"):
            at.all_to_all_v(x, [4], [4], out=torch.empty(4))

    grouped(1, on_gpu, backend="cpu:gloo,cuda:nccl", seconds=120)(run, random_cases(1, 24))


def test_several_ranks_on_one_gpu(grouped: Grouped) -> None:
    """Through host memory, and checked there."""

    def run(rank: int, size: int, comm: Any, cases: list[golden.Case]) -> None:
        assert comm.backend == "shm"
        for number, case in enumerate(cases):
            run_case(comm, case, number, "cuda")
        gradients()
        x = torch.arange(3.0 * size, device="cuda")
        out = torch.full_like(x, -1)
        sends = [3] * size if rank else [2] * size
        with pytest.raises(PeerMismatchError):
            at.all_to_all_v(x[: sum(sends)], sends, [3] * size, out=out)
        assert out.tolist() == [-1] * 3 * size
        rng = np.random.default_rng(7)
        for name in ("float16", "bfloat16", "float32", "int16", "uint32", "bool"):
            inputs = [golden.fill(rng, 9000, name) for _ in range(size)]
            for op in ("sum", "max"):
                y = to_torch(inputs[rank]).cuda()
                total = torch.empty_like(y)
                comm.reduce("all_reduce", name, total, y, op, [9000 // size] * size, y.shape).run()
                expected = reference.all_reduce(inputs, op)[rank]
                golden.assert_bits_equal(to_numpy(total.cpu()), expected, f"{op} of {name}")

    grouped(2, on_gpu, backend="gloo", seconds=120)(run, random_cases(2, 24))


def quantized_cases(comm: Any) -> None:
    every_case(comm, "cuda")
    rows_cases(comm, "cuda")
    operation_cases(comm, "cuda")


@on_group(1, on_gpu, backend="cpu:gloo,cuda:nccl", seconds=300)
def test_quantized_over_nccl_alone(rank: int, size: int, comm: Any) -> None:
    quantized_cases(comm)
    x = torch.linspace(-1, 1, 1000, device="cuda")
    param = QuantAllReduceParam(rank=rank, rank_size=size, quant_type=QuantType.DYNAMIC)
    assert torch.equal(at.QuantAllReduceOperation(param)(x), at.quantized_all_reduce(x))
    counts = {"send_counts": [4], "sdispls": [1], "recv_counts": [4], "rdispls": [0]}
    assert torch.equal(at.AllToAllVOperation(AllToAllVParam(rank=0, rank_size=1, **counts))(x)[0], x[1:5])
    with pytest.raises(InvalidTensorError):
        at.QuantAllReduceOperation(param, comm)(x.cpu())


def test_quantized_by_several_ranks_on_one_gpu(grouped: Grouped) -> None:
    grouped(2, on_gpu, backend="gloo", seconds=300)(lambda rank, size, comm: quantized_cases(comm))
