"""AllToAllVOperation on tensors that a group's engine moves, as on a GPU: here NCCL's way in host memory."""

from __future__ import annotations

import pytest
import torch
from backend_groups import Grouped
from engine_groups import Views, staged, views

import alltoallv.torch as at
from alltoallv import AllToAllVParam
from alltoallv.errors import BackendUnavailableError, InvalidParamError, InvalidTensorError, PeerMismatchError


def param_of(rank: int, size: int, gap: int = 0) -> AllToAllVParam:
    """Rank r sends j + 1 elements to rank j, after gaps."""
    sends, recvs = [j + 1 for j in range(size)], [rank + 1] * size
    sdispls = [sum(sends[:j]) + gap for j in range(size)]
    return AllToAllVParam(
        rank=rank, rank_size=size, send_counts=sends, sdispls=sdispls, recv_counts=recvs,
        rdispls=[sum(recvs[:j]) for j in range(size)],
    )  # fmt: skip


def calls(rank: int, size: int, comm: Views) -> None:
    x = torch.arange(10.0) + 100 * rank
    begin = sum(range(rank + 1)) + 2
    expected = torch.cat([torch.arange(10.0)[begin : begin + rank + 1] + 100 * j for j in range(size)])[None]
    operation = at.AllToAllVOperation(param_of(rank, size, gap=2), comm)
    for _ in range(3):
        assert torch.equal(operation(x.view(2, 5)), expected)
    out = torch.zeros_like(expected)
    assert operation(x, out=out) is out
    assert torch.equal(out, expected)
    assert operation.infer_shape(x) == expected.shape
    with pytest.raises(InvalidParamError, match=r"rank and rank_size are.*A2A-1018"):
        at.AllToAllVOperation(param_of((rank + 1) % size, size), comm)(x)
    with pytest.raises(InvalidTensorError, match="" if rank == 0 else "failed on rank 0"):
        operation(x.double() if rank == 0 else x)
    with pytest.raises(PeerMismatchError, match=r"dtype.*A2A-3009"):
        operation(x.half() if rank == 0 else x)
    assert torch.equal(operation(x), expected)


@pytest.mark.parametrize("way", [views, staged])
def test_operations_on_an_engine(grouped: Grouped, way: object) -> None:
    grouped(3, way)(calls)  # type: ignore[arg-type]


def test_a_device_without_a_group() -> None:
    operation = at.AllToAllVOperation(param_of(0, 1))
    with pytest.raises(
        BackendUnavailableError, match=r"x lies on meta and torch.distributed has no default group.*A2A-5065"
    ):
        operation(torch.ones(4, device="meta"))
