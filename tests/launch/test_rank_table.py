"""Rank tables: what is read, the ranks that it gives, and every mistake named with its server, rank and value."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from environments import TORCHRUN
from rank_tables import Table, device, table

from alltoallv.errors import InvalidParamError
from alltoallv.launch.detect import detect
from alltoallv.launch.rank_table import RankTable


def parse(made: Any) -> RankTable:
    return RankTable.parse((made if isinstance(made, str) else json.dumps(made)).encode())


def test_what_a_table_says() -> None:
    read = parse(table(2, 2, pods=2))
    assert (read.size, read.version) == (4, "1.2")
    assert read.server_of(2).server_id == "10.0.0.1"
    last = read.server_of(3).devices[1]
    assert (last.rank, last.device, last.ip, last.super_device) == (3, 1, "10.1.0.3", 13)


@pytest.mark.parametrize("made", [table(4), table(4, pods=1), table(2, 2, pods=1)])
def test_addresses_are_needed_between_what_is_not_joined_otherwise(made: Table) -> None:
    for one in (one for server in made["server_list"] for one in server["device"]):
        one.pop("device_ip", None)
    assert parse(made).servers[0].devices[0].ip == ""


def entry(made: Table, server: int, number: int) -> Table:
    found: Table = made["server_list"][server]["device"][number]
    return found


@pytest.mark.parametrize(
    ("made", "change", "message"),
    [
        (table(2, 2), lambda t: entry(t, 1, 0).pop("device_ip"), "device_ip of rank 2 on server '10.0.0.1' is ''"),
        (table(1, 1, pods=2), lambda t: entry(t, 1, 0).pop("device_ip"), "device_ip of rank 1 on server '10.0.0.1'"),
        (table(2), lambda t: entry(t, 0, 1).update(device_ip="10.1.0"), "device_ip of rank 1 on server '10.0.0.0' is "),
        (table(2), lambda t: entry(t, 0, 1).update(device_ip=7.5), "is 7.5, expected an address"),
        (
            table(2, 2),
            lambda t: entry(t, 1, 1).update(device_ip="10.1.0.0"),
            "device_ip of rank 3 on server '10.0.0.1' is '10.1.0.0', which rank 0 on server '10.0.0.0' also has",
        ),
        (
            table(2, pods=1),
            lambda t: entry(t, 0, 1).pop("super_device_id"),
            "super_device_id of rank 1 on server '10.0.0.0' is None",
        ),
        (table(2, pods=1), lambda t: entry(t, 0, 1).update(super_device_id="a"), "is 'a', expected a number"),
        (
            table(1, 1, pods=1),
            lambda t: entry(t, 1, 0).update(super_device_id="10"),
            "_id of rank 1 on server '10.0.0.1' is 10, which rank 0 on server '10.0.0.0' of super pod 'pod-0'",
        ),
        (table(1, 1, pods=1), lambda t: t["super_pod_list"][0]["server_list"].pop(), "'10.0.0.1' is in no super pod"),
        (
            table(1, 1, pods=2),
            lambda t: t["super_pod_list"][1]["server_list"].append({"server_id": "10.0.0.0"}),
            "server '10.0.0.0' is in super pod 'pod-0' and again in 'pod-1'",
        ),
        (
            table(1, pods=1),
            lambda t: t["super_pod_list"][0]["server_list"].append({"server_id": "10.0.0.0"}),
            "'10.0.0.0' is in super pod 'pod-0' and again in 'pod-0'",
        ),
        (
            table(1, pods=1),
            lambda t: t["super_pod_list"][0]["server_list"].append({"server_id": "10.0.0.9"}),
            "super pod 'pod-0' names server '10.0.0.9', expected one of ['10.0.0.0']",
        ),
        (table(1, 1, pods=2), lambda t: t["super_pod_list"][1].update(super_pod_id="pod-0"), "super_pod_id is 'pod-0'"),
        (table(1, pods=1), lambda t: t["super_pod_list"][0].pop("super_pod_id"), "super_pod_id is None"),
        (table(1, pods=1), lambda t: t.pop("super_pod_list"), "super_pod_list of the rank table is None"),
    ],
)
def test_changes_that_are_mistakes_are_named(made: Table, change: Callable[[Table], object], message: str) -> None:
    made = json.loads(json.dumps(made))
    parse(made)
    change(made)
    with pytest.raises(InvalidParamError, match=re.escape(message)):
        parse(made)


def write(tmp_path: Path, content: object) -> dict[str, str]:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    return {"RANK_TABLE_FILE": str(path)}


TWO_SERVERS = ([device(0, 0), device(1, 1)], [device(3, 5), device(2, 4)])


def test_rank_table(tmp_path):
    env = write(tmp_path, table(*TWO_SERVERS))
    found = [detect(env | {"RANK_ID": str(rank)}) for rank in range(4)]
    assert [(f.rank, f.size, f.local_rank, f.local_size) for f in found] == [
        (0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2),
    ]  # fmt: skip
    assert {f.launcher for f in found} == {"rank_table"}
    assert len({f.job_id for f in found}) == 1
    assert found[0].rank_table == env["RANK_TABLE_FILE"]
    assert found[0].master_addr == "10.0.0.0"


def test_rank_table_by_device(tmp_path):
    env = write(tmp_path, table([device(1, 6), device(0, 7)]))
    assert detect(env | {"DEVICE_ID": "6"}).rank == 1
    assert detect(env | {"DEVICE_ID": "7"}).rank == 0
    with pytest.raises(InvalidParamError, match=r"DEVICE_ID is 0, which .* does not list.*A2A-1257"):
        detect(env | {"DEVICE_ID": "0"})
    with pytest.raises(InvalidParamError, match=r"RANK_ID is not set, but .* lists 2 servers.*A2A-1256"):
        detect(write(tmp_path, table(*TWO_SERVERS)) | {"DEVICE_ID": "0"})


def test_rank_table_beside_another_launcher(tmp_path):
    env = write(tmp_path, "not read") | TORCHRUN
    assert detect(env).launcher == "torchrun"
    assert detect(env).rank_table == env["RANK_TABLE_FILE"]


def test_rank_table_and_variables_that_disagree(tmp_path):
    env = write(tmp_path, table(*TWO_SERVERS))
    with pytest.raises(InvalidParamError, match=r"RANK_ID is 4, expected less than 4.*A2A-1255"):
        detect(env | {"RANK_ID": "4"})
    with pytest.raises(InvalidParamError, match=r"RANK_SIZE is '8', expected 4.*A2A-1258"):
        detect(env | {"RANK_ID": "0", "RANK_SIZE": "8"})
    with pytest.raises(InvalidParamError, match=r"cannot be read: No such file.*A2A-1272"):
        detect({"RANK_TABLE_FILE": str(tmp_path / "none.json"), "RANK_ID": "0"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON"),
        ([], "expected a JSON object, got list"),
        (table(*TWO_SERVERS, status="initializing"), "status is 'initializing', expected 'completed'"),
        (table(*TWO_SERVERS, version="9"), "version is '9'"),
        (table(*TWO_SERVERS, server_count="3"), "server_count is '3', but server_list has 2"),
        (table(*TWO_SERVERS, server_count=2), "server_count of the rank table is 2, expected a number written as"),
        (table(*TWO_SERVERS, server_list=[]), "server_list of the rank table is []"),
        (table([]), "device of server '10.0.0.0' is []"),
        (table([device(0, 0) | {"rank_id": 0}]), "rank_id of server '10.0.0.0' is 0, expected a number written as"),
        (table([device(0, 0), device(0, 1)]), "rank_id values are [0, 0], expected 0 to 1, each once"),
        (table([device(0, 0), device(2, 1)]), "rank_id values are [0, 2]"),
        (table([device(0, 0), device(2, 1)], [device(1, 0)]), "are [0, 2], expected consecutive numbers"),
        (table([device(0, 3), device(1, 3)]), "device_id values of server '10.0.0.0' are [3, 3]"),
        (table([device(0, 0, device_port="0")]), "device_port of server '10.0.0.0' is '0', expected 1 to 65535"),
        (table(server_list=[{"server_id": "a" * 65, "device": [device(0, 0)]}], server_count="1"), "1 to 64"),
        (table(*[[device(0, 0)]], server_list=["x"]), "server_list holds 'x'"),
    ],
)
def test_unusable_tables_are_refused(content: Any, message: str) -> None:
    with pytest.raises(InvalidParamError, match=re.escape(message)):
        parse(content)


def test_a_rank_table_that_is_no_file(tmp_path):
    """The read of a pipe into which nobody writes would wait for ever."""
    pipe = tmp_path / "table.json"
    os.mkfifo(pipe)
    for path in (str(pipe), "/dev/zero", str(tmp_path)):
        with pytest.raises(
            InvalidParamError, match=r"cannot be read: (it is not a regular file|Is a directory).*A2A-1272"
        ):
            RankTable.load(path)
