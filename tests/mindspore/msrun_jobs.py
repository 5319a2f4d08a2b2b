"""Runs jobs of msrun and collects what their ranks have to say."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from alltoallv_tools.ports import free_port

HERE = Path(__file__).parent


@dataclass
class Job:
    """An msrun that has ended."""

    code: int
    output: str
    logs: dict[str, str]  # by file name, such as worker_0.log


def msrun(folder: Path, workers: int, script: Path, *arguments: str, timeout: float = 120) -> Job:
    """Runs a script on the workers of one msrun; its logs go to ``folder``."""
    port = free_port()
    command = [sys.executable, str(Path(sys.executable).parent / "msrun"), f"--worker_num={workers}"]
    command += [f"--local_worker_num={workers}", f"--master_port={port}", f"--log_dir={folder / 'log'}", "--join=True"]
    # msrun starts `python`: the one that runs the tests.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "GLOG_v": "3", "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(
        [*command, str(script), *arguments],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    logs = {path.name: path.read_text(errors="replace") for path in (folder / "log").glob("*.log")}
    return Job(done.returncode, done.stdout, logs)


def outputs(folder: Path, workers: int, script: Path, *arguments: str, timeout: float = 120) -> list[str]:
    """What each worker of a job that succeeds has said."""
    job = msrun(folder, workers, script, *arguments, timeout=timeout)
    assert job.code == 0, "\n".join(job.logs.values())[-5000:]
    return [job.logs[f"worker_{rank}.log"] for rank in range(workers)]
