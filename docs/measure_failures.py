"""What gloo, MPI and alltoallv do when a rank fails: three ranks, five faults, a limit of 20 seconds for each.

``python docs/measure_failures.py alltoallv``, ``... gloo`` (needs torch) or ``... mpi`` (needs mpi4py and its mpiexec)
prints one row of the table in docs/reliability.md for each fault. Calls have a timeout of 3 seconds,
where there is one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

SIZE, VICTIM, TIMEOUT, LIMIT = 3, 2, 3.0, 20.0
FAULTS = {
    "killed": "a rank is killed while others wait for it",
    "stopped": "a rank is stopped for good",
    "counts": "a rank sends one element more than its peer expects",
    "dtype": "a rank reduces float64, the others float32",
    "operator": "a rank calls a barrier, the others an exchange",
}
Calls = dict[str, Callable[..., Any]]


def with_alltoallv() -> tuple[int, Calls]:
    import alltoallv.numpy as an
    from alltoallv import Communicator

    comm = Communicator.from_env(timeout=TIMEOUT)
    return comm.rank, {
        "exchange": lambda x, sends, recvs: an.all_to_all_v(x, sends, recvs, group=comm),
        "reduce": lambda x: an.all_reduce(x, group=comm),
        "barrier": lambda: an.barrier(group=comm),
    }


def with_gloo() -> tuple[int, Calls]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))

    def exchange(x: Any, sends: list[int], recvs: list[int]) -> Any:
        out = torch.empty(sum(recvs))
        dist.all_to_all_single(out, torch.tensor(x), recvs, sends)
        return out.numpy()

    def reduce(x: Any) -> Any:
        tensor = torch.tensor(x)
        dist.all_reduce(tensor)
        return tensor.numpy()

    return dist.get_rank(), {"exchange": exchange, "reduce": reduce, "barrier": dist.barrier}


def with_mpi() -> tuple[int, Calls]:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD  # whose errors mpi4py makes exceptions

    def exchange(x: Any, sends: list[int], recvs: list[int]) -> Any:
        out = np.empty(sum(recvs), np.float32)
        comm.Alltoallv([x, sends], [out, recvs])
        return out

    def reduce(x: Any) -> Any:
        out = np.empty_like(x)
        comm.Allreduce(x, out)
        return out

    return comm.rank, {"exchange": exchange, "reduce": reduce, "barrier": comm.Barrier}


def rank(library: str, fault: str, folder: Path) -> None:
    """One rank: the fault in the second call; what comes of it goes into a file."""
    me, calls = {"alltoallv": with_alltoallv, "gloo": with_gloo, "mpi": with_mpi}[library]()
    ones = np.ones(6, np.float32)
    calls["exchange"](ones, [2] * 3, [2] * 3)
    calls["barrier"]()
    began = time.monotonic()
    if me == VICTIM and fault in ("killed", "stopped"):
        time.sleep(0.5)
        (folder / "cause").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    try:
        if fault == "dtype":
            output = calls["reduce"](np.ones(6, np.float64 if me == VICTIM else np.float32))
        elif fault == "operator" and me == VICTIM:
            output = calls["barrier"]()
        elif fault == "counts" and me == VICTIM:
            output = calls["exchange"](np.ones(7, np.float32), [3, 2, 2], [2] * 3)
        else:
            output = calls["exchange"](ones, [2] * 3, [2] * 3)
        told = "no error" if output is None or (np.asarray(output) == (3 if fault == "dtype" else 1)).all() else "wrong"
    except Exception as error:
        named = any(f"rank{space}{VICTIM}" in str(error) for space in (" ", ": "))
        told = type(error).__name__ + (", names the rank" if named else "")
    found = {"told": told, "began": began, "at": time.monotonic()}
    (folder / f"rank{me}").write_text(json.dumps(found))
    os._exit(0)  # what the end of such a job takes is not looked at


def start(library: str, fault: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, __file__, library, fault, str(folder)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    if library == "mpi":
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        return [subprocess.Popen([mpiexec, "-n", str(SIZE), *command], **quiet)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": SIZE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environments = [{**place, "RANK": r, "LOCAL_RANK": r} for r in range(SIZE)]
    texts = [{name: str(value) for name, value in one.items()} for one in environments]
    return [subprocess.Popen(command, env=os.environ | one, **quiet) for one in texts]


def outcome(library: str, fault: str) -> str:
    """What the ranks other than the victim came to."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes, end = start(library, fault, folder), time.monotonic() + LIMIT
        healthy = [folder / f"rank{r}" for r in range(SIZE) if r != VICTIM]
        while time.monotonic() < end and not all(file.exists() and file.stat().st_size for file in healthy):
            if all(process.poll() is not None for process in processes):
                break
            time.sleep(0.02)
        ended = all(process.poll() is not None for process in processes)
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found = [json.loads(file.read_text()) for file in healthy if file.exists()]
        if not found:
            status = f", with status {processes[0].returncode}" if len(processes) == SIZE else ""
            return f"all ranks end{status}" if ended else f"waits (more than {LIMIT:g} s)"
        cause = float(path.read_text()) if (path := folder / "cause").exists() else max(one["began"] for one in found)
        seconds = max(one["at"] for one in found) - cause
        told = sorted({one["told"] for one in found})
        waits = "" if len(found) == len(healthy) else "; another waits"
        codes = {process.returncode for process in processes[:VICTIM]} if ended and len(processes) == SIZE else set()
        if waits and any(codes):
            waits = f"; another ends with status {min(codes)}"
        return f"{' or '.join(told)}{waits}, after {seconds:.2f} s"


if __name__ == "__main__":
    if len(sys.argv) > 2:
        rank(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    if len(sys.argv) != 2 or sys.argv[1] not in ("alltoallv", "gloo", "mpi"):
        sys.exit(__doc__)
    for fault, words in FAULTS.items():
        print(f"| {words} | {outcome(sys.argv[1], fault)} |", flush=True)
