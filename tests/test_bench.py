"""The benchmark runs, checks its results, and writes what docs/bench.md describes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from alltoallv.bench import rank as bench_rank
from alltoallv.bench.cases import COLLECTIVES, PATTERNS, Case, bus_factor, moved_bytes, parse_bytes
from alltoallv.communicator import Communicator
from alltoallv.testing import reference


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "alltoallv", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_table_and_json(collective: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["--np", "1,2", "--bytes", "0,1K,64K", "--seconds", "0.05", "--peers", "", "--json", str(path)]
    done = bench(collective, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    table = [text.split() for text in done.stdout.splitlines() if text and not text.startswith("#")]
    assert table[0][:7] == ["np", "size(B)", "count", "type", "time", "min", "p90"]
    assert [(row[0], row[1]) for row in table[1:]] == [(n, b) for n in ("1", "2") for b in ("0", "1024", "65536")]
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert len(document["rows"]) == 6
    for row in document["rows"]:
        ours = row["times"]["ours"]
        assert ours["wrong"] == 0
        assert 0 < ours["min_us"] <= ours["median_us"] <= ours["p90_us"]
        assert row["count"] * 4 == row["nbytes"]


@pytest.mark.parametrize("api", ["numpy", "plan"])
@pytest.mark.parametrize("output", ["allocated", "empty", "private"])
def test_every_interface(api: str, output: str) -> None:
    done = bench("--np", "2", "--bytes", "20K", "--seconds", "0.05", "--peers", "", "--api", api, "--output", output)
    assert done.returncode == 0, done.stdout + done.stderr


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    path = tmp_path / "out.png"
    assert (
        bench("--np", "2", "--bytes", "1K,4K", "--seconds", "0.05", "--peers", "", "--plot", str(path)).returncode == 0
    )
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--bytes", "many"], ["--np", "two"], ["--peers", "carrier-pigeon"]])
def test_bad_arguments_are_named(arguments: list[str]) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert arguments[1].split(",")[0] in done.stderr


def test_a_wrong_result_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check compares with a prediction that is independent of the exchange."""
    (comm,) = Communicator.threads(1)
    case = Case("alltoallv", 4096, "float32", "uniform", "allocated")
    good = case.expected(0, 1)

    class Broken:
        name = "ours"

        def prepare(self, case: Case):
            return (lambda: None), lambda _: np.where(np.arange(1024) < 3, -1, good)

    row = bench_rank.measure(comm, [Broken()], case, 0.01)
    assert row["times"]["ours"]["wrong"] == 3
    comm.destroy()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_predictions_equal_the_reference(pattern: str, size: int) -> None:
    case = Case("alltoallv", 4 * 1000, "float32", pattern, "allocated")
    counts = case.counts(size)
    assert (counts >= 0).all()
    assert (counts.sum(1) == case.count).all()
    displs = np.cumsum(counts, 1) - counts
    outputs = reference.all_to_all_v(
        [case.input(j) for j in range(size)], counts, displs, counts.T, np.cumsum(counts.T, 1) - counts.T
    )
    for rank, output in enumerate(outputs):
        np.testing.assert_array_equal(output, case.expected(rank, size))


def test_sizes_and_bandwidths() -> None:
    assert parse_bytes("1K,3") == [1024, 3]
    assert parse_bytes("1K..16K") == [1024, 4096, 16384]
    assert parse_bytes("1K..20KiB") == [1024, 4096, 16384, 20480]
    assert bus_factor("alltoallv", 4) == 0.75
    assert bus_factor("allreduce", 4) == 1.5
    assert moved_bytes(Case("allgather", 100, "int8", "uniform", "empty"), 4) == 400
