"""Tensors of NPUs move between layouts over HCCL."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from layouts import part, random_layout
from npu_ranks import group
from on_ranks import on_ranks

import alltoallv.torch as at


@on_ranks(4, communicator=False)
def test_random_layouts(rank: int, n: int, file: str) -> None:
    rng = np.random.default_rng(6)
    with group(rank, n, file) as (world, device):
        for case in range(12):
            shape = tuple(int(length) for length in rng.integers(1, 9, rng.integers(1, 4)))
            whole = rng.integers(0, 100, shape)
            source, target = (random_layout(rng, n, len(shape)) for _ in range(2))
            x, wanted = (part(each, rank, whole) for each in (source, target))
            given = None if x is None else torch.from_numpy(x[0].copy()).to(device)
            found = at.reshard(given, source, target, group=world, device=device)
            assert (found is None) == (wanted is None)
            if found is not None and wanted is not None:
                assert found.device == device
                assert np.array_equal(found.cpu().numpy(), wanted[0]), f"case {case}: {shape}, {source} to {target}"
        dist.barrier()
