"""docs/measure.py measures what every target asks for, and the page says of each whether it is met."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from alltoallv_tools.bench.cases import Case, parse_bytes
from alltoallv_tools.bench.contenders import contenders_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
import measure
import performance_page as page


def row(size: int, nbytes: int, times: dict[str, float]) -> dict[str, Any]:
    figures = {name: {"median_us": us, "min_us": us, "max_us": us, "wrong": 0} for name, us in times.items()}
    kind = {"collective": "alltoallv", "pattern": "uniform"}
    return {"np": size, "nbytes": nbytes, **kind, "algbw": 1.0, "times": figures, "failed": {}}


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"machine": {"cpus": 2}, "rows": rows}


def verdicts(documents: dict[str, Any]) -> dict[str, str]:
    """By target: met, **not met**, not measured."""
    return {target.what: str(target).split("|")[-2].strip() for target in page.targets(documents)}


def test_without_results_every_target_is_listed_as_not_measured() -> None:
    found = verdicts({})
    assert set(found.values()) == {"not measured"}
    # table, limit, gloo, private, cycle, all_reduce, quantized, MindSpore, sparse, overhead, planner
    assert len(found) == 2 * 18 + 3 * 9 + 18 + 2 * 24 + 18 + 4 + (4 + 6) + 3 + 1 + 3 + 1


def test_the_runs_measure_all_that_the_targets_ask_for() -> None:
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
    assert [what for what, verdict in verdicts(documents).items() if verdict == "not measured"] == []


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ({"ours": 10, "mpich": 20, "openmpi": 12, "impi": 15}, "met"),
        ({"ours": 10, "mpich": 20, "openmpi": 11.9, "impi": 15}, "**not met**"),
        ({"ours": 10, "mpich": 20, "impi": 15}, "not measured"),
    ],
)
def test_the_best_of_all_three_mpis_decides(times: dict[str, float], verdict: str) -> None:
    found = verdicts({"float32": document(row(2, 1024, times))})
    assert found["float32, best MPI / ours, W=2, 1 KiB"] == verdict


def test_targets_where_less_is_better() -> None:
    documents = {
        "sparse": document(row(8, 256 << 10, {"ours": 1.0, "full": 4.0})),
        "overhead": document(row(1, 0, {"ours": 1.01, "ours-plan": 2.0})),
    }
    found = verdicts(documents)
    assert found["sparse, ours / the full exchange, W=8, 256 KiB"] == "met"
    assert found["a reused plan of nothing, W=1, through the extension, us"] == "**not met**"
    assert found["a reused plan of nothing, W=1, through NumPy, us"] == "met"
    assert found["a reused plan of nothing, W=1, through torch, us"] == "not measured"


def test_large_payloads_and_crowded_ranks_show_what_a_copy_could_reach() -> None:
    times = {"ours": 10, "mpich": 20, "openmpi": 18, "impi": 15, "copy": 12, "copy-nt": 9}
    rows = [row(size, nbytes, dict(times)) for size in (2, 4) for nbytes in (256 << 10, 64 << 20)]
    found = {target.what: target for target in page.targets({"float32": document(*rows)})}
    assert found["float32, best MPI / ours, W=2, 256 KiB"].copy is None
    for cell in ("W=2, 64 MiB", "W=4, 256 KiB", "W=4, 64 MiB"):
        assert found[f"float32, best MPI / ours, {cell}"].copy == pytest.approx(15 / 9)
    assert found["float32 into empty(), the quicker copy / ours, W=2, 64 MiB"].copy is None


def test_the_page_shows_commands_tables_and_plots(tmp_path: Path) -> None:
    machine = {"model": "a", "cpus": 2, "caches": {"L1": "32K"}, "kernel": "6", "python": "3", "load": 0.5}
    rows = [row(2, nbytes, {"ours": 10, "mpich": 20, "copy": 5}) for nbytes in (1024, 4096)]
    document = {"machine": machine, "argv": ["alltoallv", "--np", "2", "--peers", ""], "rows": rows}
    path = page.write_page(tmp_path, {"float32": document})
    text = path.read_text()
    assert "`python -m alltoallv bench alltoallv --np 2 --peers ''`" in text
    assert "| 2 | 4 KiB | 10.00 (10.00, 10) | 1.00 | 0 | 20.00 (2.00) | 5.00 (0.50) |" in text
    assert "| float32, best MPI / ours, W=2, 1 KiB | - | >= 1.2 |  | not measured |" in text
    for name in ("performance-float32.svg", "performance-plan.svg"):
        assert name in text
        assert (tmp_path / name).read_text().startswith("<?xml")


def test_the_page_says_which_machine_measured_what() -> None:
    machine = {"model": "a", "cpus": 2, "caches": {"L1": "32K"}, "kernel": "6", "python": "3", "load": 0.5}
    runs = {"one": {"machine": machine}, "two": {"machine": {**machine, "load": 2.5}}}
    end = "caches L1 32K, Linux 6, Python 3; load average"
    assert list(page.describe_machines({})) == []
    assert list(page.describe_machines(runs)) == [
        f"Machine: a, 2 processors, {end} 0.5 to 2.5 at the ends of the runs.",
        "",
    ]
    runs["three"] = {"machine": {**machine, "model": "b"}}
    assert list(page.describe_machines(runs)) == [
        f"Machine of one, two: a, 2 processors, {end} 0.5 to 2.5 at the ends of the runs.",
        "",
        f"Machine of three: b, 2 processors, {end} 0.5 to 0.5 at the ends of the runs.",
        "",
    ]


def test_a_run_is_kept_only_if_it_was_right_and_while_its_arguments_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown: dict[str, Any] = {}

    def write_page(folder: Path, documents: dict[str, Any]) -> Path:
        assert folder == tmp_path / "quick"
        shown.clear()
        shown.update(documents)
        return folder

    monkeypatch.setattr(measure, "MEASURED", tmp_path)
    monkeypatch.setattr(measure, "write_page", write_page)

    def once(arguments: str, *options: str) -> tuple[int, bool, bool]:
        """The exit code, whether it was measured, whether the page shows it."""
        monkeypatch.setattr(measure, "RUNS", (measure.Run("sparse", arguments),))
        monkeypatch.setattr(sys, "argv", ["measure.py", "--quick", *options])
        code = measure.main()
        return code, "# time: us of a call" in capfd.readouterr().out, "sparse" in shown

    small = "alltoallv --np 1 --pattern sparse --bytes"
    assert once(f"{small} 1K") == (0, True, True)
    assert once(f"{small} 1K") == (0, False, True)
    assert once(f"{small} 2K", "--report") == (0, False, False)
    with monkeypatch.context() as broken:
        broken.setenv("ALLTOALLV_PATH", "nonsense")
        assert once(f"{small} 2K") == (1, True, False)
    assert once(f"{small} 2K") == (0, True, True)
    assert [each["nbytes"] for each in shown["sparse"]["rows"]] == [2048]
