"""Prints the host's time of a call beside that of torch's own, on one GPU: ``python -m alltoallv run -n 1 THIS``."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import alltoallv.torch as at
from alltoallv.torch.engines.nccl import FIRST

CALLS = 2000


def microseconds(call: Callable[[], object]) -> float:
    for _ in range(100):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS * 1e6


torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl")
x = torch.ones(1024, device="cuda")
out, plan = torch.empty_like(x), at.Plan([1024], [1024], device="cuda")
for _ in range(FIRST):
    at.all_to_all_v(x, [1024], [1024], out=out)
calls: dict[str, Callable[[], object]] = {
    "torch's all_to_all_single": lambda: dist.all_to_all_single(out, x),
    "torch's all_to_all": lambda: dist.all_to_all([out], [x]),
    "all_to_all_v with out": lambda: at.all_to_all_v(x, [1024], [1024], out=out),
    "all_to_all_single": lambda: at.all_to_all_single(out, x),
    "plan": lambda: plan(x, out),
}
print(torch.cuda.get_device_name(), "torch", torch.__version__)
for name, call in calls.items():
    print(f"{name}: {microseconds(call):.1f} us")
dist.destroy_process_group()
