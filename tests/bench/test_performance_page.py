"""docs/measure.py measures what every target asks for, and the page says of each whether it is met."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import alltoallv
from alltoallv_tools.bench.cases import Case, parse_bytes
from alltoallv_tools.bench.parties import contenders_of

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


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    """By target: met, **not met**, not measured."""
    return {target.what: str(target).split("|")[-2].strip() for target in pages.targets(found)}


def test_the_page_is_what_the_script_makes_of_the_figures_that_are_kept(tmp_path: Path) -> None:
    kept = pages.load(measure.DOCS / "measured.json")
    assert pages.page(kept) == (measure.DOCS / "performance.md").read_text()
    assert {name: run["argv"] for name, run in kept["runs"].items()} == {
        run.name: run.argv(quick=False) for run in measure.RUNS
    }
    pages.save(kept, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (measure.DOCS / "measured.json").read_text()


def test_without_results_every_target_is_listed_as_not_measured() -> None:
    found = verdicts({"runs": {}})
    assert set(found.values()) == {"not measured"}
    # table, limit, gloo, private, cycle, all_reduce, quantized, MindSpore, sparse, overhead, planner
    assert len(found) == 2 * 18 + 3 * 9 + 18 + 2 * 24 + 18 + 4 + (4 + 6) + 3 + 1 + 3 + 1


def test_the_runs_measure_all_that_the_targets_ask_for(tmp_path: Path) -> None:
    documents = {}
    for run in measure.RUNS:
        if run.arguments == "kernels":
            continue
        argv = run.argv(quick=False)
        options = dict(zip(argv[1::2], argv[2::2], strict=True))
        case = Case(argv[0], 0, pattern=options.get("--pattern", "uneven"))
        parties = ["ours", *filter(None, options["--peers"].split(","))]
        names = [name for party in parties for name in contenders_of(party, case, options.get("--api", "numpy"))]
        names += ["ours-torch-plan"] * (run.environment == "torch")
        sizes = [int(size) for size in options["--np"].split(",")]
        payloads = parse_bytes(options.get("--bytes", "0"))
        rows = [row(n, b, dict.fromkeys(names, 1.0 + b)) for n in sizes for b in payloads]
        documents[run.name] = document(*rows)
    assert [what for what, verdict in verdicts(figures(documents, tmp_path)).items() if verdict == "not measured"] == []


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ({"ours": 10, "mpich": 20, "openmpi": 12, "impi": 15}, "met"),
        ({"ours": 10, "mpich": 20, "openmpi": 11.9, "impi": 15}, "**not met**"),
        ({"ours": 10, "mpich": 20, "impi": 15}, "not measured"),
    ],
)
def test_the_best_of_all_three_mpis_decides(times: dict[str, float], verdict: str, tmp_path: Path) -> None:
    found = verdicts(figures({"float32": document(row(2, 1024, times))}, tmp_path))
    assert found["float32, best MPI / ours, W=2, 1 KiB"] == verdict


def test_targets_where_less_is_better(tmp_path: Path) -> None:
    documents = {
        "sparse": document(row(8, 256 << 10, {"ours": 1.0, "full": 4.0})),
        "overhead": document(row(1, 0, {"ours": 1.01, "ours-plan": 2.0})),
    }
    found = verdicts(figures(documents, tmp_path))
    assert found["sparse, ours / the full exchange, W=8, 256 KiB"] == "met"
    assert found["a reused plan of nothing, W=1, through the extension, us"] == "**not met**"
    assert found["a reused plan of nothing, W=1, through NumPy, us"] == "met"
    assert found["a reused plan of nothing, W=1, through torch, us"] == "not measured"


def test_large_payloads_and_crowded_ranks_show_what_a_copy_could_reach(tmp_path: Path) -> None:
    times = {"ours": 10, "mpich": 20, "openmpi": 18, "impi": 15, "copy": 12, "copy-nt": 9}
    rows = [row(size, nbytes, dict(times)) for size in (2, 4) for nbytes in (256 << 10, 64 << 20)]
    kept = figures({"float32": document(*rows)}, tmp_path)
    found = {target.what: target for target in pages.targets(kept)}
    assert found["float32, best MPI / ours, W=2, 256 KiB"].copy is None
    for cell in ("W=2, 64 MiB", "W=4, 256 KiB", "W=4, 64 MiB"):
        assert found[f"float32, best MPI / ours, {cell}"].copy == pytest.approx(15 / 9)
    assert found["float32 into empty(), the quicker copy / ours, W=2, 64 MiB"].copy is None


def test_the_page_shows_commands_tables_and_who_failed(tmp_path: Path) -> None:
    rows = [row(2, nbytes, {"ours": 10, "mpich": 20, "copy": 5}) for nbytes in (1024, 4096)]
    del rows[1]["times"]["mpich"]
    rows[1]["failed"] = {"mpich": "its job exited with code 1"}
    argv = ("alltoallv", "--np", "2", "--peers", "")
    text = pages.page(figures({"float32": document(*rows, argv=argv)}, tmp_path))
    assert "`python -m alltoallv bench alltoallv --np 2 --peers ''`" in text
    assert "| 2 | 1 KiB | 10.00 (10.00, 10) | 1.00 | 20.00 (2.00) | 5.00 (0.50) |" in text
    assert "| 2 | 4 KiB | 10.00 (10.00, 10) | 1.00 | - | 5.00 (0.50) |" in text
    assert "mpich failed: its job exited with code 1" in text
    assert "| float32, best MPI / ours, W=2, 1 KiB | - | >= 1.2 |  | not measured |" in text


def test_the_page_names_the_machine_and_figures_of_another_are_dropped(tmp_path: Path) -> None:
    one, other = document(row(2, 1024, {"ours": 1})), document(row(2, 1024, {"ours": 1}), load=2.5)
    kept = figures({"float32": one, "int8": other}, tmp_path)
    machine, versions, _ = pages.describe(kept)
    end = "caches L1 32K, Linux 6, Python 3; load average 0.5 to 2.5 at the ends of the runs, "
    assert machine.startswith(f"Machine: a, 2 processors, {end}20")
    assert versions.startswith(f"Versions: alltoallv {alltoallv.__version__}, numpy ")
    other["machine"]["model"] = "b"
    assert list(figures({"float32": one, "int8": other}, tmp_path)["runs"]) == ["int8"]
    assert list(pages.describe({"runs": {}})) == []


def test_a_run_is_kept_only_if_it_was_right_and_while_its_arguments_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "MEASURED", tmp_path)

    def once(arguments: str, *options: str) -> tuple[int, bool, list[int]]:
        """The exit code, whether it was measured, the bytes of the rows that are kept."""
        monkeypatch.setattr(measure, "RUNS", (measure.Run("sparse", arguments),))
        monkeypatch.setattr(sys, "argv", ["measure.py", "--quick", *options])
        code = measure.main()
        kept = pages.load(tmp_path / "quick/measured.json")
        assert (tmp_path / "quick/performance.md").read_text() == pages.page(kept)
        sizes = [each["nbytes"] for each in pages.rows(kept["runs"].get("sparse"))]
        return code, "# time: us of a call" in capfd.readouterr().out, sizes

    small = "alltoallv --np 1 --pattern sparse --bytes"
    assert once(f"{small} 1K", "--report") == (0, False, [])
    assert once(f"{small} 1K") == (0, True, [1024])
    assert once(f"{small} 1K") == (0, False, [1024])
    with monkeypatch.context() as broken:
        broken.setenv("ALLTOALLV_PATH", "nonsense")
        assert once(f"{small} 2K") == (1, True, [1024])
    assert once(f"{small} 2K") == (0, True, [2048])
    assert once(f"{small} 2K", "--fresh") == (0, True, [2048])
