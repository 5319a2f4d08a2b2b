"""Each client's program gives gloo's bits on backend `alltoallv`; the program itself compares with one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from client_programs import HERE, PROGRAMS, found


def same(ours: Any, gloos: Any, where: str = "") -> int:
    """Compares nested tensors by their bits, and returns how many there are."""
    assert type(ours) is type(gloos), where
    if isinstance(ours, torch.Tensor):
        assert (ours.shape, ours.dtype) == (gloos.shape, gloos.dtype), where
        assert torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (ours, gloos))), where
        return 1
    if isinstance(ours, dict):
        assert ours.keys() == gloos.keys(), where
        return sum(same(ours[key], gloos[key], f"{where}[{key!r}]") for key in ours)
    if isinstance(ours, list | tuple):
        assert len(ours) == len(gloos), where
        return sum(same(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(ours, gloos, strict=True)))
    assert ours == gloos, where
    return 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", found())
def test_bits_of_gloo(client: str, tmp_path: Path) -> None:
    name, ranks = PROGRAMS[client]
    command = [sys.executable, "-m", "alltoallv", "run", "-n", str(ranks), str(HERE / name), str(tmp_path)]
    for backend in ("alltoallv", "gloo"):
        job = subprocess.run(
            [*command, backend], check=False, capture_output=True, text=True, timeout=280, env=dict(os.environ)
        )
        assert job.returncode == 0, f"{job.stdout[-4000:]}\n{job.stderr[-4000:]}"
    kept = [[torch.load(tmp_path / f"{b}-{rank}.pt") for b in ("alltoallv", "gloo")] for rank in range(ranks)]
    assert min(same(*pair) for pair in kept) > 0
