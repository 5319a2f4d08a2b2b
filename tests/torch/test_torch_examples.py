"""The PyTorch programs of examples/ as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MOE = Path(__file__).resolve().parents[2] / "examples" / "moe_torch.py"
LAUNCHERS = {
    "alltoallv": ["-m", "alltoallv", "run", "--no-prefix", "-n"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"],
}


@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        ("alltoallv", 4),
        pytest.param("alltoallv", 3, marks=pytest.mark.slow),
        pytest.param("torchrun", 2, marks=pytest.mark.slow),
    ],
)
def test_moe_torch(launcher: str, size: int) -> None:
    """3 ranks have 3, 3 and 2 experts, and unequal parts of a batch."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ALLTOALLV_")}
    command = [sys.executable, *LAUNCHERS[launcher], str(size), str(MOE), "--epochs", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=env)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    epochs = [line for line in lines if line.startswith("epoch")]
    assert lines[-1] == "same losses"
    assert len(epochs) == 4  # 2 of all ranks, 2 of one process
    assert epochs[:2] == epochs[2:]  # 12 decimals of the loss, and the accuracy
    losses = [float(line.split()[3].rstrip(",")) for line in epochs]
    assert losses[1] < 0.5 * losses[0]
