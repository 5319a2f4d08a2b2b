"""What the tests of starting share: rank tables, launchers' variables, programs, HCCL's communicators, an exchange."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from npu_ranks import exchange

import alltoallv_emulator as emulator
from alltoallv import Communicator


def write_table(path: Path, servers: list[int], version: str = "1.0", **more: Any) -> str:
    """A rank table of so many devices on each server."""

    def device(rank: int) -> dict[str, str]:
        return {"device_id": str(rank), "device_ip": f"10.1.0.{rank}", "rank_id": str(rank)}

    ranks = iter(range(sum(servers)))
    table = {
        "status": "completed",
        "version": version,
        "server_count": str(len(servers)),
        "server_list": [
            {"server_id": f"10.0.0.{i}", "device": [device(next(ranks)) for _ in range(n)]}
            for i, n in enumerate(servers)
        ],
    } | more
    if version == "1.2":
        members = [{"server_id": f"10.0.0.{i}"} for i in range(len(servers))]
        table["super_pod_list"] = [{"super_pod_id": "0", "server_list": members}]
        for server in table["server_list"]:
            for device in server["device"]:
                device["super_device_id"] = device["rank_id"]
    path.write_text(json.dumps(table))
    return str(path)


def exchange_works(comm: Communicator, device: torch.device) -> None:
    assert exchange(comm, device) == list(range(comm.size))


OWN = ("RANK", "WORLD_SIZE", "JOB_ID", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RESTART_COUNT")


def forget_launcher() -> None:
    """Takes away what the test's own pool says of this rank."""
    for name in OWN:
        os.environ.pop(f"ALLTOALLV_{name}", None)


def start_as_msrun(rank: int, size: int, port: int, **more: object) -> None:
    """Puts the variables of msrun, and more, in the place of the launcher's."""
    forget_launcher()
    variables: dict[str, object] = {"RANK_ID": rank, "RANK_SIZE": size, "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": size}
    variables |= {"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": port} | more
    os.environ.update({name: str(value) for name, value in variables.items()})


def start_with_table(rank: int, table: str) -> None:
    forget_launcher()
    os.environ.update({"RANK_TABLE_FILE": table, "RANK_ID": str(rank)})


def hccl_comm(rank: int, table: str) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """HCCL's library, and a communicator of it that the test owns."""
    library, comm = ctypes.CDLL(str(emulator.library_folder() / "libhccl.so")), ctypes.c_void_p()
    assert library.HcclCommInitClusterInfo(table.encode(), rank, ctypes.byref(comm)) == 0
    return library, comm


def wheel() -> Path:
    """The folder of torch_npu's wheel, without an import of it."""
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def run_program(
    *arguments: str, ranks: int = 2, timeout: int = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program on emulated NPUs in a user's environment: no library of the emulator is in it."""
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"} | variables
    env.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    command = [sys.executable, "-m", "alltoallv", "run", "--emulate-npu", "-n", str(ranks), "--timeout", str(timeout)]
    return subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, check=False)
