"""How jobs are started: by launchers that are here, or as their ranks would be, with the variables that they set."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alltoallv_tools.ports import free_port

PROGRAM = str(Path(__file__).with_name("job.py"))
NAMED = "ALLTOALLV_SOAK"  # a variable that all processes of a soak inherit, so that those left behind are found

#: What the ranks of a launcher find in their environment: rank, size and port.
VARIABLES: dict[str, dict[str, str]] = {
    "torchrun's variables": {
        "RANK": "{rank}", "WORLD_SIZE": "{size}", "LOCAL_RANK": "{rank}", "LOCAL_WORLD_SIZE": "{size}",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}",
    },
    "msrun's variables": {
        "RANK_ID": "{rank}", "RANK_SIZE": "{size}", "MS_WORKER_NUM": "{size}", "MS_ROLE": "MS_WORKER",
        "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "{port}",
    },
    "mpirun's variables": {
        "OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "{size}", "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "{size}", "PMIX_NAMESPACE": "soak-{port}",
    },
    "Paddle's variables": {
        "PADDLE_TRAINER_ID": "{rank}", "PADDLE_TRAINERS_NUM": "{size}", "PADDLE_LOCAL_RANK": "{rank}",
        "PADDLE_LOCAL_SIZE": "{size}", "PADDLE_MASTER": "127.0.0.1:{port}",
    },
}  # fmt: skip
#: Of these, the ones by which nothing but an address tells jobs apart.
BY_ADDRESS = ("torchrun's variables", "msrun's variables", "Paddle's variables")


def kinds(real: bool = True) -> list[str]:
    """Ways to start a job on this machine."""
    found = ["run", *VARIABLES]
    if real and (spec := importlib.util.find_spec("torch")) and spec.origin is not None:
        found.append("torchrun")
    if real and shutil.which("mpiexec"):
        found.append("mpiexec")
    return found


@dataclass
class Job:
    """A job that runs.

    Attributes:
        name: Of the files in which its ranks write what they found.
        process: Its launcher, with a process group of its own.
    """

    name: str
    kind: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def wait(self, seconds: float) -> str:
        """Returns "" once it has ended, else says that it did not; it is ended then."""
        assert self.process is not None
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"{self.name} ({self.kind}) had not ended after {seconds:.0f} s: {self.printed()}"
        finally:
            self.end()
        return ""

    def end(self) -> None:
        """Ends what is left of it: politely, then for good."""
        assert self.process is not None
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(3)

    def printed(self) -> str:
        """The end of what its processes wrote."""
        file = self.folder / f"{self.name}.log"
        return file.read_text(errors="replace")[-1500:] if file.exists() else ""

    def found(self) -> list[dict[str, Any]]:
        """What its ranks found."""
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob(f"{self.name}=*.json"))]


def start(
    kind: str, name: str, size: int, spec: Mapping[str, Any], folder: Path, env: Mapping[str, str], port: int = 0
) -> Job:
    """Starts ``size`` ranks of job.py; ``port`` 0 stands for a free one, and launchers choose theirs."""
    port = port or free_port()
    file = folder / f"{name}.spec"
    file.write_text(json.dumps({**spec, "name": name, "size": size}))
    command = [sys.executable, PROGRAM, str(file)]
    more: dict[str, str] = {}
    if kind in VARIABLES:  # from a shell of its own, as a script would
        lines = []
        for rank in range(size):
            given = (f"{k}={v.format(rank=rank, size=size, port=port)}" for k, v in VARIABLES[kind].items())
            lines.append(f"env {' '.join(given)} {shlex.join(command)} &")
        command = ["sh", "-c", " ".join([*lines, "wait"])]
    elif kind == "run":
        command = [sys.executable, "-m", "alltoallv", "run", "-n", str(size), *command[1:]]
    elif kind == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(size), "--standalone"]
        command = [sys.executable, *torchrun, *command[1:]]
    else:
        more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        command = ["mpiexec", "-n", str(size), *command]
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command, env={**env, **more}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    return Job(name, kind, folder, process)


def left_behind(mark: str) -> list[int]:
    """Processes of a soak that live, without this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and f"{NAMED}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found
