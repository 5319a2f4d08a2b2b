"""Measures what order="rank" costs an all-reduce of float32: its speed over that of the plain one.

python -m alltoallv run -n 2 --no-prefix docs/measure_order.py                  host memory
python -m alltoallv run --emulate-npu -n 2 --no-prefix docs/measure_order.py    emulated NPUs

Both are called in turn; the figure is the median of the ratios of neighbours, whose noise is the same.
"""

from __future__ import annotations

import os
import statistics
import time

import torch

import alltoallv.torch as at
from alltoallv import Communicator

CALLS = 200
EMULATED = "ALLTOALLV_EMULATOR_DEVICES" in os.environ


def main() -> None:
    comm = Communicator.from_env(backend="hccl" if EMULATED else "auto")
    if EMULATED:
        import torch_npu  # noqa: F401

        torch.npu.set_device(comm.rank)
    settle = torch.npu.synchronize if EMULATED else lambda: None

    def seconds(x: torch.Tensor, order: str | None) -> float:
        at.all_to_all_single(torch.empty_like(meets), meets, group=comm)  # the ranks begin together
        settle()
        begin = time.perf_counter()
        at.all_reduce(x, group=comm, order=order)
        settle()
        return time.perf_counter() - begin

    meets = torch.ones(comm.size, device="npu" if EMULATED else "cpu")
    for numel in (1 << 10, 1 << 18, 1 << 21):
        x = torch.zeros(numel, device=meets.device)
        pairs = [(seconds(x, None), seconds(x, "rank")) for _ in range(CALLS // (4 if numel > 1 << 18 else 1))]
        if comm.rank == 0:
            ratio = statistics.median(plain / ordered for plain, ordered in pairs[len(pairs) // 10 :])
            plain, ordered = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
            print(f"{numel * 4 >> 10} KiB: plain {plain:.3f} ms, rank {ordered:.3f} ms, {ratio:.2f} of its speed")


if __name__ == "__main__":
    main()
