"""Tensors of NPUs move between layouts over HCCL."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from layouts import check_pieces, part, random_layout, rounded
from npu_ranks import group
from on_ranks import on_ranks

import alltoallv.torch as at
import alltoallv.torch.api.resharding as tensors
from alltoallv.errors import InvalidParamError


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
        weights = rng.normal(size=(8, 12)).astype("float32")
        source, target = (list(range(n)), [0]), (list(range(n)), [1])
        values, _ = rounded(source, target, n, weights, "int8", None)
        x, wanted = part(source, rank, weights), part(target, rank, values)
        found = at.reshard(torch.from_numpy(x[0]).to(device), source, target, format="int8", group=world)
        assert np.array_equal(found.cpu().numpy(), wanted[0])
        with pytest.raises(InvalidParamError, match="format is nvfp4, which this engine does not offer"):
            at.reshard(found, target, source, format="nvfp4", group=world)
        numbers = types.SimpleNamespace(size=n, rank=rank)
        check_pieces(
            at,
            tensors._Tools,
            lambda x: torch.from_numpy(x).to(device),
            lambda x: x.cpu().numpy(),
            numbers,
            world,
            (None, "int8"),
            device=device,
        )
        dist.barrier()
