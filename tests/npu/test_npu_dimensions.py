"""One dimension of NPUs' tensors for another, over HCCL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from npu_ranks import group
from on_ranks import on_ranks
from swaps import check_swaps

import alltoallv.torch as at
from alltoallv.torch import from_group


@on_ranks(2, communicator=False)
def test_by_the_definition(rank: int, n: int, file: str) -> None:
    with group(rank, n, file) as (world, device):

        def gradient(loss: Any, x: torch.Tensor) -> Any:
            x = x.clone().requires_grad_()
            return torch.autograd.grad(loss(x), x)[0].cpu().numpy()

        def tensor(x: Any) -> torch.Tensor:
            return torch.from_numpy(x.copy()).to(device)

        comm: Any = from_group(world, device="npu")
        check_swaps(at, tensor, gradient, comm, world, cases=8, dtypes=["float32", "int8"], refuses=False)
        dist.barrier()
