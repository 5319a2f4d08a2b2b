"""The shared-scale pipeline on emulated NPUs: int8 moves, the sum is exact, so the bits are those of NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from npu_ranks import bits, group, on

import alltoallv.torch as at
from alltoallv.testing import Ranks
from alltoallv.testing.golden import assert_bits_equal


def test_shared_scale_over_a_group(ranks: Ranks, tmp_path: Path) -> None:
    def check(rank: int, size: int, file: str) -> None:
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

    ranks(2, communicator=False)(check, str(tmp_path / "store"))
