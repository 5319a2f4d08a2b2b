"""Children of a program compute on its devices: however they are started."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

CODE = """
import builtins, torch
import torch_npu
print((torch.ones(4).npu() * 2).sum().item(), getattr(builtins, "own_sitecustomize", False))
"""


def child(rank: int, queue: Any) -> None:
    import torch_npu  # noqa: F401

    queue.put((torch.ones(3).npu() * (rank + 1)).sum().item())


class Doubled(Dataset[float]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> float:
        import torch_npu  # noqa: F401

        return (torch.tensor(float(index)).npu() * 2).item()


if __name__ == "__main__":
    queue = mp.get_context("spawn").Queue()
    mp.spawn(child, (queue,), nprocs=2)
    spawned = sorted(queue.get() for _ in range(2))
    loader = DataLoader(Doubled(), num_workers=1, multiprocessing_context="spawn", batch_size=None)
    started = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    print(
        f"spawned {spawned} loaded {[float(x) for x in loader]} started {started.stdout.splitlines()[-1]}", flush=True
    )
