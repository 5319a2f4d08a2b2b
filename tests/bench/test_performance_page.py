"""docs/measure.py measures every way that the page shows, and the page names what misses its goal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
import measure
import measure_steps
import performance_page as pages

from alltoallv_tools.bench.jobs import Jobs


def row(size: int, nbytes: int, times: dict[str, float]) -> dict[str, Any]:
    """As `bench --json` has it."""
    figures = {
        name: {"median_us": us, "min_us": us, "max_us": us, "ratio": us / times["ours"], "wrong": 0}
        for name, us in times.items()
    }
    kind = {"collective": "alltoallv", "pattern": "uniform"}
    return {"np": size, "nbytes": nbytes, **kind, "algbw": 1.0, "times": figures, "failed": {}}


def document(*rows: dict[str, Any], load: float = 0.5, argv: tuple[str, ...] = ("alltoallv",)) -> dict[str, Any]:
    """What `bench --json` wrote."""
    machine = {"model": "a", "cpus": 2, "caches": {"L1": "32K"}, "kernel": "6", "python": "3", "load": load}
    return {"machine": machine, "argv": list(argv), "rows": rows}


def figures(documents: dict[str, Any], path: Path) -> dict[str, Any]:
    """What is kept of them."""
    path = path / "measured.json"
    path.unlink(missing_ok=True)
    for name, each in documents.items():
        measure.keep(name, each, path)
    return pages.load(path)


def test_the_page_is_what_the_script_makes_of_the_figures_that_are_kept(tmp_path: Path) -> None:
    kept = pages.load(measure.DOCS / "measured.json")
    assert pages.page(kept) == (measure.DOCS / "performance.md").read_text()
    assert {name: run["command"] for name, run in kept["runs"].items() if name not in ("hosts", "steps")} == {
        run.name: measure.command(run.argv(quick=False)) for run in measure.RUNS
    }
    pages.save(kept, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (measure.DOCS / "measured.json").read_text()


def test_every_way_of_the_page_is_measured_beside_its_peers() -> None:
    runs = {run.name: run for run in measure.RUNS}
    assert set(runs) | {"hosts", "steps"} == {way.run for way in pages.WAYS} | set(pages.OTHERS)
    for way in pages.WAYS:
        assert set(way.peers) == set(runs[way.run].peers.split(","))


@pytest.mark.slow
def test_a_run_is_kept_only_if_it_was_right_and_while_its_arguments_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "MEASURED", tmp_path)

    def once(arguments: str, *options: str) -> tuple[int, bool, list[int]]:
        """The exit code, whether it was measured, the bytes of the rows that are kept."""
        monkeypatch.setattr(measure, "RUNS", (measure.Run("plan", arguments),))
        monkeypatch.setattr(sys, "argv", ["measure.py", "--quick", *options])
        code = measure.main()
        kept = pages.load(tmp_path / "quick/measured.json")
        assert (tmp_path / "quick/performance.md").read_text() == pages.page(kept)
        sizes = [each["nbytes"] for each in pages.rows(kept, "plan")]
        return code, "# time: µs of a call" in capfd.readouterr().out, sizes

    small = "alltoallv --np 1 --bytes"
    assert once(f"{small} 1K", "--report") == (0, False, [])
    assert once(f"{small} 1K") == (0, True, [1024])
    assert once(f"{small} 1K") == (0, False, [1024])
    with monkeypatch.context() as broken:
        broken.setenv("ALLTOALLV_PATH", "nonsense")
        assert once(f"{small} 2K") == (1, True, [1024])
    assert once(f"{small} 2K") == (0, True, [2048])
    assert once(f"{small} 2K", "--fresh") == (0, True, [2048])


@pytest.mark.slow
def test_calls_that_nothing_warms_and_where_they_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_steps, "SIZES", (1024,))
    with Jobs("numpy", bind=True, say=print) as jobs:
        told = {way: measure_steps.measure(jobs, way, 1) for way in ("plan", "us", "private")}
    kinds = ["the first call of a job", "the same again", "a new size at each call", "after 10 ms of other work"]
    for times in told.values():
        assert list(times) == [(kind, 1024) for kind in kinds]
        assert min(times.values()) > 0
    figures({"plan": document(row(2, 1024, {"ours": 1.0, "mpich": 2.0}))}, tmp_path)
    columns = ["np", "collective", "nbytes", *measure_steps.WAYS]
    pages.add("steps", "measure", columns, [[2, "a call", 1024, *range(1, 7)]], tmp_path)
    page = (tmp_path / "performance.md").read_text()
    assert "| a call | 1 KiB | 1.00 | 2.00 | 3.00 | 4.00 | 5.00 | 6.00 |" in page
    assert "On another machine: " in page
