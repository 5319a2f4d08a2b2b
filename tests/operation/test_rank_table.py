"""Rank tables: what is read, and every mistake named with its server, rank and value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from alltoallv.errors import InvalidParamError
from alltoallv.launch.rank_table import RankTable

Table = dict[str, Any]


def table(*servers: int, pods: int = 0) -> Table:
    """So many devices on each server; with ``pods`` format 1.2, the servers dealt out to that many super pods."""
    ranks = iter(range(sum(servers)))
    listed: list[Table] = []
    for i, count in enumerate(servers):
        devices = []
        for number in range(count):
            rank = next(ranks)
            devices.append({"device_id": str(number), "device_ip": f"10.1.0.{rank}", "rank_id": str(rank)})
            if pods:
                devices[-1]["super_device_id"] = str(10 + rank)
        listed.append({"server_id": f"node-{i}", "device": devices})
    made: Table = {"status": "completed", "version": "1.0", "server_count": str(len(servers)), "server_list": listed}
    if pods:
        members = [[{"server_id": f"node-{i}"} for i in range(p, len(servers), pods)] for p in range(pods)]
        made["version"] = "1.2"
        made["super_pod_list"] = [{"super_pod_id": f"pod-{p}", "server_list": m} for p, m in enumerate(members)]
    return made


def parse(made: Table) -> RankTable:
    return RankTable.parse(json.dumps(made).encode())


def without(made: Table, key: str) -> Table:
    for server in made["server_list"]:
        for device in server["device"]:
            device.pop(key, None)
    return made


def test_what_a_table_says() -> None:
    read = parse(table(2, 2, pods=2))
    assert (read.size, read.version) == (4, "1.2")
    assert read.server_of(2).server_id == "node-1"
    device = read.server_of(3).devices[1]
    assert (device.rank, device.device, device.ip, device.super_device) == (3, 1, "10.1.0.3", 13)


@pytest.mark.parametrize("made", [table(4), table(4, pods=1), table(2, 2, pods=1)])
def test_addresses_are_needed_between_what_is_not_joined_otherwise(made: Table) -> None:
    assert parse(without(made, "device_ip")).servers[0].devices[0].ip == ""


def device(made: Table, server: int, number: int) -> Table:
    found: Table = made["server_list"][server]["device"][number]
    return found


@pytest.mark.parametrize(
    ("made", "change", "message"),
    [
        (table(2, 2), lambda t: device(t, 1, 0).pop("device_ip"), "device_ip of rank 2 on server 'node-1' is ''"),
        (table(1, 1, pods=2), lambda t: device(t, 1, 0).pop("device_ip"), "device_ip of rank 1 on server 'node-1'"),
        (table(2), lambda t: device(t, 0, 1).update(device_ip="10.1.0"), "device_ip of rank 1 on server 'node-0' is "),
        (table(2), lambda t: device(t, 0, 1).update(device_ip=7.5), "is 7.5, expected an address"),
        (
            table(2, 2),
            lambda t: device(t, 1, 1).update(device_ip="10.1.0.0"),
            "device_ip of rank 3 on server 'node-1' is '10.1.0.0', which rank 0 on server 'node-0' has, too",
        ),
        (
            table(2, pods=1),
            lambda t: device(t, 0, 1).pop("super_device_id"),
            "super_device_id of rank 1 on server 'node-0' is None",
        ),
        (table(2, pods=1), lambda t: device(t, 0, 1).update(super_device_id="a"), "is 'a', expected a number"),
        (
            table(1, 1, pods=1),
            lambda t: device(t, 1, 0).update(super_device_id="10"),
            "super_device_id of rank 1 on server 'node-1' is 10, which rank 0 on server 'node-0' of super pod 'pod-0'",
        ),
        (table(1, 1, pods=1), lambda t: t["super_pod_list"][0]["server_list"].pop(), "'node-1' is in no super pod"),
        (
            table(1, 1, pods=2),
            lambda t: t["super_pod_list"][1]["server_list"].append({"server_id": "node-0"}),
            "server 'node-0' is in super pod 'pod-0' and again in 'pod-1'",
        ),
        (
            table(1, pods=1),
            lambda t: t["super_pod_list"][0]["server_list"].append({"server_id": "node-0"}),
            "'node-0' is in super pod 'pod-0' and again in 'pod-0'",
        ),
        (
            table(1, pods=1),
            lambda t: t["super_pod_list"][0]["server_list"].append({"server_id": "node-9"}),
            "super pod 'pod-0' names server 'node-9', expected one of ['node-0']",
        ),
        (table(1, 1, pods=2), lambda t: t["super_pod_list"][1].update(super_pod_id="pod-0"), "super_pod_id is 'pod-0'"),
        (table(1, pods=1), lambda t: t["super_pod_list"][0].pop("super_pod_id"), "super_pod_id is None"),
        (table(1, pods=1), lambda t: t.pop("super_pod_list"), "super_pod_list of the rank table is None"),
    ],
)
def test_mistakes_are_named(made: Table, change: Callable[[Table], object], message: str) -> None:
    made = json.loads(json.dumps(made))
    parse(made)
    change(made)
    with pytest.raises(InvalidParamError, match=re.escape(message)):
        parse(made)
