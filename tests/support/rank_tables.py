"""Rank tables for tests."""

from __future__ import annotations

import itertools
from typing import Any

Table = dict[str, Any]


def device(rank: int, number: int, **more: Any) -> Table:
    """The entry of a rank."""
    return {"device_id": str(number), "device_ip": f"10.1.0.{rank}", "rank_id": str(rank), **more}


def table(*servers: int | list[Table], pods: int = 0, **more: Any) -> Table:
    """Of servers with these devices, or so many; with ``pods`` in format 1.2, dealt out to that many super pods."""
    ranks = itertools.count()
    listed: list[Table] = []
    for i, one in enumerate(servers):
        devices = [device(next(ranks), number) for number in range(one)] if isinstance(one, int) else one
        listed.append({"server_id": f"10.0.0.{i}", "device": devices})
    made: Table = {"status": "completed", "version": "1.0", "server_count": str(len(servers)), "server_list": listed}
    if pods:
        for entry in (entry for server in listed for entry in server["device"]):
            entry["super_device_id"] = str(10 + int(entry["rank_id"]))
        members = [[{"server_id": f"10.0.0.{i}"} for i in range(p, len(servers), pods)] for p in range(pods)]
        made["version"] = "1.2"
        made["super_pod_list"] = [{"super_pod_id": f"pod-{p}", "server_list": m} for p, m in enumerate(members)]
    return made | more
