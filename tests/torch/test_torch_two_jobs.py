"""Two jobs of one init_method: ranks of one refuse those of the other."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

# Rank ``rank`` of a job, by the backend alltoallv, or by its functions on a group of gloo.
RANK = """if True:
    import os, sys
    backend, url, early, job, rank = sys.argv[1:]
    if rank != early:
        sys.exit(sys.stdin.read())  # it would have come late
    import torch, torch.distributed as dist, alltoallv.torch as at
    try:
        dist.init_process_group(backend, init_method=url, rank=int(rank), world_size=2)
        x = torch.tensor([int(job)])
        at.all_reduce(x)
        line = f"sum {x.item()}"
    except Exception as error:
        line = f"{type(error).__name__}: {error}"
    os.write(1, f"{line}\\n".encode())
    os._exit(0)  # without a farewell to the group
"""
START = """if True:
    import subprocess, sys
    ranks = [subprocess.Popen([sys.executable, "-c", *sys.argv[1:], str(j)]) for j in range(2)]
    for rank in ranks:
        rank.wait()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(("method", "backend"), [("tcp", "gloo"), ("file", "alltoallv")])
def test_two_jobs_of_one_init_method(tmp_path: Path, method: str, backend: str) -> None:
    url = f"tcp://127.0.0.1:{free_port()}" if method == "tcp" else f"file://{tmp_path}/store"
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", START, RANK, backend, url, early, job],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for early, job in (("0", "1"), ("1", "100"))
    ]  # fmt: skip
    try:
        for job in jobs:
            assert job.stdin is not None
            assert job.stderr is not None
            assert any("two jobs have one address" in line for line in job.stderr)
            job.stdin.close()  # the late rank, which would be refused, too, ends
        for line in [job.stdout.readline() for job in jobs if job.stdout is not None]:
            assert line.startswith("InvalidParamError: ")
            assert "which has not been started with this rank" in line
            assert "two jobs have one address" in line
    finally:
        for job in jobs:
            job.kill()
