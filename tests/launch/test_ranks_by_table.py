"""Ranks by a rank table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from environments import TORCHRUN

from alltoallv.errors import InvalidParamError
from alltoallv.launch.detect import detect


def device(rank: int, number: int, **more: str) -> dict[str, str]:
    return {"device_id": str(number), "device_ip": f"192.168.1.{rank}", "rank_id": str(rank), **more}


def table(*servers: list[dict[str, str]], **more: object) -> dict[str, object]:
    listed = [{"server_id": f"10.0.0.{i}", "device": devices} for i, devices in enumerate(servers)]
    return {
        "status": "completed",
        "version": "1.0",
        "server_count": str(len(servers)),
        "server_list": listed,
    } | more


def write(tmp_path: Path, content: object) -> dict[str, str]:
    path = tmp_path / "table.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
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
    with pytest.raises(InvalidParamError, match=r"DEVICE_ID is 0, which .* does not list"):
        detect(env | {"DEVICE_ID": "0"})
    with pytest.raises(InvalidParamError, match=r"RANK_ID is not set, but .* lists 2 servers"):
        detect(write(tmp_path, table(*TWO_SERVERS)) | {"DEVICE_ID": "0"})


def test_rank_table_beside_another_launcher(tmp_path):
    env = write(tmp_path, "not read") | TORCHRUN
    assert detect(env).launcher == "torchrun"
    assert detect(env).rank_table == env["RANK_TABLE_FILE"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON"),
        ([], "expected a JSON object, got list"),
        (table(*TWO_SERVERS, status="initializing"), "status is 'initializing', expected 'completed'"),
        (table(*TWO_SERVERS, version="9"), "version is '9'"),
        (table(*TWO_SERVERS, server_count="3"), "server_count is '3', but server_list has 2"),
        (
            table(*TWO_SERVERS, server_count=2),
            "server_count of the rank table is 2, expected a number written as",
        ),
        (table(*TWO_SERVERS, server_list=[]), "server_list of the rank table is []"),
        (table([]), "device of server '10.0.0.0' is []"),
        (
            table([device(0, 0) | {"rank_id": 0}]),
            "rank_id of server '10.0.0.0' is 0, expected a number written as",
        ),
        (table([device(0, 0), device(0, 1)]), "rank_id values are [0, 0], expected 0 to 1, each once"),
        (table([device(0, 0), device(2, 1)]), "rank_id values are [0, 2]"),
        (table([device(0, 0), device(2, 1)], [device(1, 0)]), "are [0, 2], expected consecutive numbers"),
        (table([device(0, 3), device(1, 3)]), "device_id values of server '10.0.0.0' are [3, 3]"),
        (
            table([device(0, 0, device_port="0")]),
            "device_port of server '10.0.0.0' is '0', expected 1 to 65535",
        ),
        (table(server_list=[{"server_id": "a" * 65, "device": [device(0, 0)]}], server_count="1"), "1 to 64"),
        (table(*[[device(0, 0)]], server_list=["x"]), "server_list holds 'x'"),
    ],
)
def test_unusable_rank_table(tmp_path, content, message):
    with pytest.raises(InvalidParamError, match=re.escape(message)):
        detect(write(tmp_path, content) | {"RANK_ID": "0"})


def test_rank_table_and_variables_that_disagree(tmp_path):
    env = write(tmp_path, table(*TWO_SERVERS))
    with pytest.raises(InvalidParamError, match="RANK_ID is 4, expected less than 4"):
        detect(env | {"RANK_ID": "4"})
    with pytest.raises(InvalidParamError, match="RANK_SIZE is '8', expected 4"):
        detect(env | {"RANK_ID": "0", "RANK_SIZE": "8"})
    with pytest.raises(InvalidParamError, match="cannot be read: No such file"):
        detect({"RANK_TABLE_FILE": str(tmp_path / "none.json"), "RANK_ID": "0"})
