"""What a program finds before its first call: CUDA untouched, and a way without a C compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FORKED = """
import os, torch, torch.distributed as dist, alltoallv.torch
assert not torch.cuda.is_initialized()
dist.init_process_group("alltoallv", rank=0, world_size=1, store=dist.HashStore())
child = os.fork()
if child == 0:
    torch.zeros(1).cuda()  # refused in a fork of a process that has touched CUDA
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
QUANTIZED = """
import torch, torch.distributed as dist, alltoallv.torch as at
torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl")
x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
assert torch.equal(at.quantized_all_reduce(x.cuda()).cpu(), at.quantized_all_reduce(x))
"""


def run(program: str, *launcher: str, **env: str) -> None:
    command = [sys.executable, *launcher, "-c", program] if not launcher else [sys.executable, *launcher]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_import_does_not_touch_cuda() -> None:
    run(FORKED)


def test_quantized_without_a_c_compiler(tmp_path: Path) -> None:
    """Triton needs one to launch a kernel; without it torch's operators have the same bits."""
    program = tmp_path / "quantized.py"
    program.write_text(QUANTIZED)
    env = {"CC": "/nonexistent", "PATH": str(Path(sys.executable).parent), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    run("", "-m", "alltoallv", "run", "-n", "1", str(program), **env)
