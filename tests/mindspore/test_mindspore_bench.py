"""The benchmark's competitors that need MindSpore: ours through alltoallv.mindspore, and its own collectives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alltoallv_tools.cli import main


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "others"),
    [
        ("alltoallv --output private --variant rewritten --peers ,", set()),
        ("allgather --variant cycle --peers mindspore", {"mindspore"}),
        ("allreduce --output private --variant cycle --peers mindspore", {"mindspore"}),
        ("quantized --output empty --variant rewritten --peers mindspore", {"mindspore", "ours-full", "ours-fp32"}),
    ],
)
def test_contenders_of_mindspore(arguments: str, others: set[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ["--api", "mindspore", "--np", "2", "--bytes", "10000", "--seconds", "0", "--json", str(path)]
    assert main(["bench", *arguments.split(), *options]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["failed"] == {}
    assert set(row["times"]) == {"ours", "copy", "copy-nt"} | others
    assert not any(times["wrong"] for times in row["times"].values())
