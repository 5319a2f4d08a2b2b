"""What the tests of starting share: rank tables, ports, an environment without the test's own launcher, an exchange."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import torch
from npu_ranks import exchange

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
