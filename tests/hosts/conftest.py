"""Two hosts on this machine, and ranks started on them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from alltoallv.errors import BackendUnavailableError
from alltoallv.testing.hosts import Host, joined_hosts

FOLDER = Path(__file__).parent
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[Host]]:
    try:
        with joined_hosts() as hosts:
            yield hosts
    except BackendUnavailableError as error:
        pytest.skip(f"no two hosts on this machine: {error}")


def environment(rank: int, size: int, on_host: int, address: str, port: int) -> dict[str, str]:
    """A rank's variables, as torchrun sets them."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("ALLTOALLV")},
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % on_host),
        "LOCAL_WORLD_SIZE": str(on_host),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


class Ranks:
    """Processes that run a program of this folder on several hosts, or on this one."""

    def __init__(self, program: str, hosts: Sequence[Host], size: int, *arguments: str, port: int = 29_500) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(size):
            on_host = size // max(len(hosts), 1)
            env = environment(rank, size, on_host, hosts[0].address if hosts else "127.0.0.1", port)
            command = [sys.executable, str(FOLDER / program), *arguments]
            if hosts:
                command = hosts[rank // on_host].command(*command)
            self.processes.append(
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )

    def outputs(self, seconds: float = 120) -> list[str]:
        """What each has printed, once all have ended; kills those that have not by then."""
        end = time.monotonic() + seconds
        texts = []
        for process in self.processes:
            try:
                texts.append(process.communicate(timeout=max(end - time.monotonic(), 0.1))[0])
            except subprocess.TimeoutExpired:
                process.kill()
                texts.append(process.communicate()[0] + "\n(killed: it took too long)")
        return texts

    def codes(self) -> list[int]:
        return [process.returncode for process in self.processes]
