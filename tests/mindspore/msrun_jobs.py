"""Runs jobs of msrun and collects what their ranks have to say."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
REPORT: list[str] = []  # what the end of the test run says


@dataclass
class Job:
    """An msrun that has ended."""

    code: int
    seconds: float
    output: str
    logs: dict[str, str]  # by file name, such as worker_0.log


def msrun(
    folder: Path,
    workers: int,
    script: Path,
    *arguments: str,
    timeout: float = 120,
    env: Mapping[str, str] = os.environ,
) -> Job:
    """Runs a script on the workers of one msrun; its logs go to ``folder``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(Path(sys.executable).parent / "msrun"), f"--worker_num={workers}"]
    command += [f"--local_worker_num={workers}", f"--master_port={port}", f"--log_dir={folder / 'log'}", "--join=True"]
    # msrun starts `python`: the one that runs the tests.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**env, "PATH": path, "OMP_NUM_THREADS": "1", "GLOG_v": "3", "PYTHONFAULTHANDLER": "1"}
    begin = time.monotonic()
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
    seconds = time.monotonic() - begin
    logs = {path.name: path.read_text(errors="replace") for path in (folder / "log").glob("*.log")}
    return Job(done.returncode, seconds, done.stdout, logs)
