"""The benchmark's competitors that need torch: ours through alltoallv.torch, and gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alltoallv_tools.bench import backend
from alltoallv_tools.cli import main

REDUCED = {"ours-full", "ours-fp32", "gloo-bf16", "composed"}


@pytest.mark.parametrize(
    ("arguments", "others"),
    [
        pytest.param("alltoallv --api torch --variant rewritten", set(), marks=pytest.mark.slow),
        pytest.param("alltoallv --api torch-plan --output private --variant cycle", set(), marks=pytest.mark.slow),
        pytest.param("allgather --api torch --output private --dtype int32", set(), marks=pytest.mark.slow),
        pytest.param("quantized --api torch", REDUCED, marks=pytest.mark.slow),
    ],
)
def test_contenders_of_torch(arguments: str, others: set[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ["--np", "2", "--bytes", "10000", "--seconds", "0", "--peers", "gloo", "--json", str(path)]
    assert main(["bench", *arguments.split(), *options]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["failed"] == {}
    assert set(row["times"]) == {"ours", "gloo", "copy", "copy-nt"} | others
    assert not any(times["wrong"] for times in row["times"].values())


@pytest.mark.parametrize("left_out", ["group", pytest.param("nothing", marks=pytest.mark.slow)])
def test_calls_of_the_backend(
    left_out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [case for case in backend.CASES if left_out not in case.collective]
    monkeypatch.setattr(backend, "CASES", cases)
    path = tmp_path / "out.json"
    assert main(["bench", "backend", "--np", "2", "--iters", "1", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    table = capsys.readouterr().out
    for row, case in zip(rows, cases, strict=True):
        assert row["collective"] == case.collective
        assert case.collective in table
        assert set(row["times"]) == set(backend.competitors(case)) >= {"ours", "gloo"}
        for times in row["times"].values():
            assert times["wrong"] == 0
            assert 0 < times["min_us"] <= times["median_us"]
