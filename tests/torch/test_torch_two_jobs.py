"""Two jobs of one init_method: ranks of one refuse ranks of the other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from started import wait_gone

from alltoallv_tools.ports import free_port

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
            job.stdin.close()  # the late rank, which would also be refused, ends
        for line in [job.stdout.readline() for job in jobs if job.stdout is not None]:
            assert line.startswith("InvalidParamError: ")
            assert "which has not been started with this rank" in line
            assert "two jobs have one address" in line
    finally:
        for job in jobs:
            job.kill()


def has_seat(pid: int) -> bool:
    links = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(one))
    lines = [line for line in Path("/proc/net/unix").read_text().splitlines() if "@alltoallv-seat-" in line]
    return any(f"socket:[{line.split()[6]}]" in links for line in lines)


class Rank:
    """A rank of a job, which joins once it is told to. Its starter is that of its job."""

    def __init__(self, folder: Path, starter: subprocess.Popen[str], rank: int) -> None:
        self.file = folder / f"{starter.pid}.{rank}"
        assert starter.stdout is not None
        self.pid = int(starter.stdout.readline())

    def join(self) -> None:
        self.file.touch()

    def said(self) -> str:
        while not (said := self.file.read_text()).endswith("\n"):
            time.sleep(0.02)
        return said


# A job of three ranks, forked from what has imported torch: each waits until its file is there, and writes to it.
START_WAITING = """if True:
    import os, sys, time
    import torch, torch.distributed as dist, alltoallv.torch as at
    url, folder = sys.argv[1:]

    def join(rank, file):
        while not os.path.exists(file):
            time.sleep(0.02)
        try:
            dist.init_process_group("alltoallv", init_method=url, rank=rank, world_size=3)
            x = torch.ones(1)
            at.all_reduce(x)
            line = f"sum {x.item()}"
        except Exception as error:
            line = f"{type(error).__name__}: {error}"
        with open(file, "a") as told:
            told.write(f"{line}\\n")
        os._exit(0)

    starter = os.getpid()
    for rank in range(3):
        pid = os.fork()
        if pid == 0:
            join(rank, f"{folder}/{starter}.{rank}")
        print(pid, flush=True)
    for _ in range(3):
        os.wait()
"""


def test_those_whose_peers_have_been_refused(tmp_path: Path) -> None:
    """Ranks that were left out of both jobs have ended when the others meet in the store."""
    url = f"file://{tmp_path}/store"
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", START_WAITING, url, str(tmp_path)],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        first, second = ([Rank(tmp_path, starter, rank) for rank in range(3)] for starter in starters)
        for early in (first[0], second[1]):
            early.join()
            while not has_seat(early.pid):
                time.sleep(0.02)
        for refused in (first[1], second[0]):
            refused.join()
            assert "InvalidParamError" in refused.said()
            assert "another job has the same address" in refused.said()
        os.kill(second[2].pid, signal.SIGKILL)
        assert wait_gone([first[1].pid, second[0].pid, second[2].pid], 30) == []
        first[2].join()
        for rank in (first[0], second[1], first[2]):
            assert "two jobs have one address" in rank.said()
    finally:
        for starter in starters:
            os.killpg(starter.pid, signal.SIGKILL)
