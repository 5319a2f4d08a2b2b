"""Starts ranks with the local launcher, as a user does."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

RUN = [sys.executable, "-m", "alltoallv", "run"]


def run(tmp_path: Path, program: str, *options: str, limit: float = 60, **kwargs) -> subprocess.CompletedProcess:
    """Runs ``program`` on ranks; output as bytes."""
    script = tmp_path / "program.py"
    script.write_text(program)
    return subprocess.run([*RUN, *options, str(script)], capture_output=True, timeout=limit, check=False, **kwargs)


def start(tmp_path: Path, program: str, *options: str) -> subprocess.Popen:
    script = tmp_path / "program.py"
    script.write_text(program)
    return subprocess.Popen([*RUN, *options, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def read_lines(process: subprocess.Popen, count: int) -> list[bytes]:
    return [process.stdout.readline() for _ in range(count)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_gone(pids: list[int], seconds: float = 5) -> list[int]:
    """Waits for processes to end; returns those that have not."""
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left
