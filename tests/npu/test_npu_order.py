"""Emulated HCCL adds in an order that depends on the length."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from npu_ranks import emulated, group
from on_ranks import on_ranks


def rows(rank: int, device: torch.device) -> torch.Tensor:
    """Four times 184 rows, which differ by rank."""
    made = torch.Generator().manual_seed(rank)
    return torch.randn(4 * 184, 5120, generator=made).to(torch.bfloat16).to(device)


@on_ranks(8, communicator=False)
def test_rows_in_a_longer_batch(rank: int, n: int, file: str) -> None:
    """The same rows have the same bits whatever stands beside them only if the order is that of the ranks."""
    with group(rank, n, file) as (_, device):
        x = rows(rank, device)
        for order, agree in (("length", False), ("rank", True), ("halving", True)):
            few, many = x[:184].clone(), x.clone()
            torch.npu.synchronize()
            with emulated(order=order):
                dist.all_reduce(few)
                dist.all_reduce(many)
                torch.npu.synchronize()
            assert torch.equal(few, many[:184]) == agree, order


@pytest.mark.parametrize("size", [3, 4])
@on_ranks(communicator=False)
def test_orders(rank: int, n: int, file: str) -> None:
    """One term is 2^24, where float32 has even numbers only; the others are 1."""
    with group(rank, n, file) as (_, device):
        x = torch.full((n,), 2.0**24 if rank == 0 else 1.0).to(device)
        above = {}
        for order in ("rank", "ring", "halving"):
            total, part = x.clone(), torch.empty(1, device=device)
            torch.npu.synchronize()
            with emulated(order=order):
                dist.all_reduce(total)
                dist.reduce_scatter_tensor(part, x)
                torch.npu.synchronize()
            assert part.item() == total[rank].item()
            above[order] = [int(value) - 2**24 for value in total.tolist()]
        ring, halving = {3: ([2, 0, 0], 0), 4: ([4, 4, 0, 0], 2)}[n]  # part j: from rank j + 1 on, round to j
        assert above == {"rank": [0] * n, "ring": ring, "halving": [halving] * n}
