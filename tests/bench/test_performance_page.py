"""docs/measure.py measures every way that the page shows, and the page names what misses its goal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import alltoallv

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
import measure
import performance_page as pages


def row(size: int, nbytes: int, times: dict[str, float]) -> dict[str, Any]:
    """As `bench --json` has it."""
    figures = {name: {"median_us": us, "min_us": us, "max_us": us, "wrong": 0} for name, us in times.items()}
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


def missed(found: dict[str, Any]) -> dict[str, float]:
    """What falls short: where and of what, and the figure."""
    return {f"{each.row['np']} x {each.row['nbytes']}: {each.what}": each.figure for each in pages.shortfalls(found)}


def test_the_page_is_what_the_script_makes_of_the_figures_that_are_kept(tmp_path: Path) -> None:
    kept = pages.load(measure.DOCS / "measured.json")
    assert pages.page(kept) == (measure.DOCS / "performance.md").read_text()
    assert {name: run["command"] for name, run in kept["runs"].items() if name != "hosts"} == {
        run.name: measure.command(run.argv(quick=False)) for run in measure.RUNS
    }
    pages.save(kept, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (measure.DOCS / "measured.json").read_text()


def test_every_way_of_the_page_is_measured_beside_its_peers() -> None:
    runs = {run.name: run for run in measure.RUNS}
    assert set(runs) | {"hosts"} == {way.run for way in pages.WAYS} | set(pages.OTHERS)
    for way in pages.WAYS:
        assert set(way.peers) == set(runs[way.run].peers.split(","))


@pytest.mark.parametrize(
    ("nbytes", "times", "short"),
    [
        (1024, {"mpich": 20, "openmpi": 12, "impi": 15, "copy": 1, "copy-nt": 1}, {}),
        (1024, {"mpich": 20, "openmpi": 9, "impi": 15}, {"2 x 1024: times as fast as openmpi": 0.9}),
        (4 << 20, {"mpich": 20, "copy": 9.5, "copy-nt": 12}, {}),
        (4 << 20, {"mpich": 20, "copy": 12, "copy-nt": 8}, {f"2 x {4 << 20}: of a copy's speed": 0.8}),
    ],
)
def test_what_is_behind_the_best_mpi_or_a_copy_falls_short(
    nbytes: int, times: dict[str, float], short: dict[str, float], tmp_path: Path
) -> None:
    found = figures({"plan": document(row(2, nbytes, {"ours": 10, **times}))}, tmp_path)
    assert missed(found) == pytest.approx(short)
    text = pages.page(found)
    assert ("every figure reaches its goal" in text) is not bool(short)
    assert (f"- A plan, into `empty()`: {pages.CROWDED}." in text) is bool(short)


def test_a_copy_is_no_limit_of_a_reduction(tmp_path: Path) -> None:
    times = {"ours": 10, "mpich": 20, "copy": 1, "copy-nt": 1}
    assert missed(figures({"allreduce": document(row(2, 4 << 20, times))}, tmp_path)) == {}


def test_the_page_shows_commands_tables_and_who_failed(tmp_path: Path) -> None:
    rows = [row(2, nbytes, {"ours": 10, "mpich": 20, "copy": 9.5, "copy-nt": 30}) for nbytes in (1024, 4 << 20)]
    del rows[0]["times"]["mpich"]
    rows[0]["failed"] = {"mpich": "its job exited with code 1"}
    argv = ("alltoallv", "--np", "2", "--peers", "")
    text = pages.page(figures({"plan": document(*rows, argv=argv)}, tmp_path))
    assert "`python -m alltoallv bench alltoallv --np 2 --peers ''`" in text
    assert "| 2 | 1 KiB | 10.00 (10.00, 10.00) | 1.00 | - | - | - | |" in text
    assert "| 2 | 4 MiB | 10.00 (10.00, 10.00) | 1.00 | mpich | 20.00 | 2.00 | 0.95 |" in text
    assert "mpich failed: its job exited with code 1" in text
    assert "Not measured: What a small call costs;" in text or "Not measured: The function" in text


def test_calls_of_torch_distributed_keep_their_names(tmp_path: Path) -> None:
    rows = [row(2, 1024, {"ours": 10, "gloo": 500, "floor": 3}) for _ in range(2)]
    for each, name in zip(rows, ("all_to_all_single", "DDP step"), strict=True):
        each["collective"] = name
    text = pages.page(figures({"backend": document(*rows, argv=("backend",))}, tmp_path))
    assert "| all_to_all_single | 10.00 | 500 | 50.00 | 3.00 |  |" in text
    assert "| DDP step | 10.00 | 500 | 50.00 | 3.00 |  |" in text


def test_the_page_names_the_machine_and_figures_of_another_are_dropped(tmp_path: Path) -> None:
    one, other = document(row(2, 1024, {"ours": 1})), document(row(2, 1024, {"ours": 1}), load=2.5)
    kept = figures({"plan": one, "function": other}, tmp_path)
    machine, versions = pages.describe(kept)
    end = "caches L1 32K, Linux 6, Python 3; load average 0.5 to 2.5 at the ends of the runs, "
    assert machine.startswith(f"Machine: a, 2 processors, {end}20")
    assert versions.startswith(f"Versions: alltoallv {alltoallv.__version__}, numpy ")
    other["machine"]["model"] = "b"
    assert list(figures({"plan": one, "function": other}, tmp_path)["runs"]) == ["function"]
    assert "Nothing has been measured" in pages.page({"runs": {}})


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
        return code, "# time: us of a call" in capfd.readouterr().out, sizes

    small = "alltoallv --np 1 --bytes"
    assert once(f"{small} 1K", "--report") == (0, False, [])
    assert once(f"{small} 1K") == (0, True, [1024])
    assert once(f"{small} 1K") == (0, False, [1024])
    with monkeypatch.context() as broken:
        broken.setenv("ALLTOALLV_PATH", "nonsense")
        assert once(f"{small} 2K") == (1, True, [1024])
    assert once(f"{small} 2K") == (0, True, [2048])
    assert once(f"{small} 2K", "--fresh") == (0, True, [2048])
