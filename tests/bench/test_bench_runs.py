"""The benchmark runs, checks its results, writes what docs/bench.md describes, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from started import ALLTOALLV, alltoallv

from alltoallv_tools.bench import environments
from alltoallv_tools.bench import rank as bench_rank
from alltoallv_tools.bench.cases import VARIANTS, WAYS, Case
from alltoallv_tools.bench.competitors import Prepared
from alltoallv_tools.bench.jobs import Job, LibraryError
from alltoallv_tools.bench.rounds import Blocks, Found, measure, row_of
from alltoallv_tools.cli import main as cli

COMMAND = [*ALLTOALLV, "bench"]
SLOW = pytest.mark.slow
QUICK = ["--np", "2", "--seconds", "0.05", "--peers", ""]


def measured(tmp_path: Path, *arguments: str, limit: float = 120) -> dict[str, Any]:
    """The document of a run that succeeds."""
    path = tmp_path / "out.json"
    done = alltoallv("bench", *arguments, "--json", str(path), limit=limit)
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def check_row(row: dict[str, Any], competitors: set[str]) -> None:
    assert row["failed"] == {}
    assert set(row["times"]) == competitors
    for times in row["times"].values():
        assert times["wrong"] == 0
        assert times["min_us"] <= times["median_us"] <= times["p90_us"] <= times["max_us"]
        assert times["min_us"] > 0 or row["variant"] != "plain"  # of the others what they do in between is subtracted
    assert row["count"] * np.dtype(row["dtype"]).itemsize == row["nbytes"]


@pytest.mark.parametrize(
    "collective", ["alltoallv", pytest.param("allgather", marks=SLOW), pytest.param("allreduce", marks=SLOW)]
)
def test_table_and_json(collective: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["--np", "1,2", "--bytes", "0,1K,64K", "--seconds", "0.05", "--peers", "", "--json", str(path)]
    done = alltoallv("bench", collective, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    table = [text.split() for text in done.stdout.splitlines() if text and not text.startswith("#")]
    assert table[0][:7] == ["np", "size(B)", "count", "type", "time", "min", "max"]
    assert [(row[0], row[1]) for row in table[1:]] == [(n, b) for n in ("1", "2") for b in ("0", "1024", "65536")]
    document = json.loads(path.read_text())
    assert document["schema"] == 4
    assert document["complete"]
    assert document["argv"] == [collective, *arguments[:4], "--peers", "", "--seconds", "0.05"]
    assert document["machine"]["cpus"] == len(os.sched_getaffinity(0))
    assert len(document["rows"]) == 6
    for row in document["rows"]:
        check_row(row, {"ours", "copy", "copy-nt"})


@pytest.mark.parametrize(
    ("output", "variant", "pattern", "dtype", "api"),
    [
        ("allocated", "cycle", "uneven", "float32", "numpy"),
        pytest.param("empty", "rewritten", "uniform", "int8", "core", marks=SLOW),
        ("private", "consumed", "skewed", "complex64", "plan"),
        pytest.param("private", "cycle", "moe", "float64", "core", marks=SLOW),
    ],
)
def test_outputs_variants_patterns_and_interfaces(
    output: str, variant: str, pattern: str, dtype: str, api: str, tmp_path: Path
) -> None:
    options = {"output": output, "variant": variant, "pattern": pattern, "dtype": dtype}
    arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
    document = measured(tmp_path, *QUICK, "--bytes", "20483", "--api", api, *arguments)
    (row,) = document["rows"]
    check_row(row, {"ours", "copy", "copy-nt"})
    assert {name: row[name] for name in options} == options
    assert document["api"] == api


def test_each_way_has_a_column(tmp_path: Path) -> None:
    (row,) = measured(tmp_path, *QUICK, "--bytes", "64K", "--ways", "--output", "private")["rows"]
    check_row(row, {"ours", *WAYS, "copy", "copy-nt"})


def test_a_plan_and_a_sparse_pattern(tmp_path: Path) -> None:
    (row,) = measured(tmp_path, *QUICK, "--bytes", "4K", "--api", "plan", "--pattern", "sparse")["rows"]
    check_row(row, {"ours", "full", "copy", "copy-nt"})


@SLOW
def test_quantized(tmp_path: Path) -> None:
    for row in measured(tmp_path, "quantized", *QUICK, "--bytes", "100K,3M")["rows"]:
        check_row(row, {"ours", "ours-full", "ours-fp32", "copy", "copy-nt"})


def test_kernels(tmp_path: Path) -> None:
    rows = measured(tmp_path, "kernels", "--bytes", "64K", "--seconds", "0.05")["rows"]
    assert {row["kernel"] for row in rows} == {"quantize", "dequantize_sum", "sum_shared", "cast_float16"}
    assert not any(row["wrong"] for row in rows)


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), pytest.param("svg", b"<?xml", marks=SLOW)])
def test_plot(suffix: str, magic: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"out.{suffix}"
    done = alltoallv("bench", *QUICK, "--bytes", "1K,4K", "--plot", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--bytes many", "--bytes has 'many', expected a size"),
        ("--np two", "--np is 'two', expected numbers of at least 1"),
        ("--np 0", "--np is '0', expected numbers of at least 1"),
        ("--peers carrier-pigeon", "--peers has carrier-pigeon"),
        ("alltoallv --peers mindspore", "mindspore, which has no alltoallv"),
        ("overhead --peers mindspore", "mindspore, which has no overhead"),
        ("--dtype nonsense", "--dtype is 'nonsense', expected bool, complex128"),
        ("--dtype bfloat16", "--dtype is 'bfloat16'"),
        ("allreduce --dtype complex64", "--dtype is 'complex64'"),
        ("quantized --dtype float16", "--dtype is 'float16', expected float32 for quantized"),
        ("alltoallv --api core --output allocated", "--output is 'allocated', expected empty or private"),
        ("quantized --api torch --output private", "--output is 'private', expected allocated for quantized"),
        ("overhead --plot x.svg", "--plot draws times over sizes"),
        ("--plot x.foo", "--plot is 'x.foo', expected a name that ends with .png or .svg"),
        ("--json missing/x.json", "--json is 'missing/x.json', expected a file in a folder that exists"),
    ],
)
def test_what_makes_no_sense_is_named(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(["bench", *arguments.split()]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("bench: ")
    assert reason in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    "arguments",
    ["allgather --pattern moe", "overhead --api plan", "kernels --np 2", "alltoallv --device cpu", "kernels --no-bind"],
)
def test_options_of_another_subject(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    subject, _, option = arguments.partition(" ")
    with pytest.raises(SystemExit, match=r"^2$"):
        cli(["bench", *arguments.split()])
    assert f"unrecognized arguments: {option}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^0$"):
        cli(["bench", subject, "--help"])
    described = capsys.readouterr().out
    assert option.split()[0] not in described
    assert "--seconds" in described


def test_nothing_is_installed_unasked(tmp_path: Path) -> None:
    """Without torch `bench backend` names the option that would get it; without a home nothing else is looked for."""
    program = (
        "import os, pwd, sys\n"
        "sys.modules['torch'] = None\n"
        "def nobody(uid): raise KeyError(f'getpwuid(): uid not found: {uid}')\n"
        "pwd.getpwuid = nobody\n"
        "from alltoallv_tools.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    env.pop("ALLTOALLV_BENCH_CACHE", None)

    def bench(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, "bench", *words]
        return subprocess.run(command, env=env | more, capture_output=True, text=True, timeout=60, check=False)

    folder = tmp_path / "cache"
    unasked = bench("backend", ALLTOALLV_BENCH_CACHE=str(folder))
    assert unasked.returncode == 2
    assert "bench: torch is not installed here; --install makes an environment that has it" in unasked.stderr
    assert not folder.exists()
    homeless = bench("alltoallv", *QUICK, "--bytes", "1K", "--peers", "mpich")
    assert homeless.returncode == 0, homeless.stderr
    assert "left out: mpich: this user has no home; set HOME or ALLTOALLV_BENCH_CACHE to a folder" in homeless.stderr


@SLOW
def test_a_peer_that_cannot_be_had_is_reported_and_left_out(tmp_path: Path) -> None:
    """Pip is told to use an index that is not there."""
    env = {**os.environ, "ALLTOALLV_BENCH_CACHE": str(tmp_path), "PIP_NO_INDEX": "1"}
    done = alltoallv("bench", "--np", "2", "--bytes", "1K", "--seconds", "0.05", "--peers", "mpich", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "making an environment for mpich" in done.stderr
    assert "left out: mpich: no environment for mpich" in done.stderr
    assert not environments.is_ready("mpich") or "mpich" not in os.listdir(tmp_path)


class Broken:
    """A library of one rank with no transport: the first calls are right, the next ones have 3 wrong elements."""

    rank, size = 0, 1

    def __init__(self, right: int) -> None:
        self.competitors = {"ours": self}
        self._right = right

    def barrier(self) -> None:
        pass

    def prepare(self, case: Case) -> Prepared:
        good = case.expected(0, 1)
        bad = np.where(np.arange(good.size) < 3, -1, good)
        calls = count()
        return Prepared(lambda: good if next(calls) < self._right else bad, lambda value: value, case.input(0))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("right", "before", "after"), [(0, 3, 3), (2, 0, 3), (100, 0, 0)])
def test_wrong_results_are_counted_before_and_after_the_blocks(
    variant: str, right: int, before: int, after: int
) -> None:
    """Two calls prepare; a block's last result is what is checked after it, whatever the variant does with it."""
    server = bench_rank.Server(Broken(right))
    case = Case("alltoallv", 4096, variant=variant)
    assert server.answer({"do": "prepare", "competitor": "ours", "case": case.asdict()})["wrong"] == before
    reply = server.answer({"do": "run", "competitor": "ours", "calls": 4, "warm": 1})
    assert ("work" in reply) == (variant != "plain")
    assert server.answer({"do": "check", "competitor": "ours"})["wrong"] == after


class Scripted(Job):
    """A job whose ranks are not there, whose calls take 2 us but for the first; it fails when asked to do ``fails``."""

    def __init__(self, library: str, fails: str = "") -> None:
        self.library, self.size, self._fails = library, 2, fails

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        if request["do"] == self._fails:
            raise LibraryError(f"{self.library}: {self._fails}")
        return {
            "prepare": [{"wrong": 0, "once": 1.0}] * 2,
            "run": [{"span": [0.0, 2e-6 * request.get("calls", 0)]}] * 2,
        }.get(request["do"], [{"wrong": 1}] * 2)


@pytest.mark.parametrize("fails", ["prepare", "run", "check"])
@pytest.mark.parametrize("earlier", [0, 2])
def test_a_party_that_fails_is_taken_out_and_the_others_are_kept(fails: str, earlier: int) -> None:
    case, columns, found = Case("alltoallv", 1 << 20), {"ours": ("ours", "copy"), "mpich": ("mpich",)}, Found()
    for _ in range(earlier):
        sound: dict[str, Job] = {"ours": Scripted("ours"), "mpich": Scripted("mpich")}
        assert measure(sound, case, 0, columns, found) == {}
    jobs: dict[str, Job] = {"ours": Scripted("ours"), "mpich": Scripted("mpich", fails)}
    failed = measure(jobs, case, 0, columns, found)
    assert list(jobs) == ["ours"]
    assert failed == {"mpich": f"mpich: {fails}"}
    row = row_of(case, 2, found, failed)
    assert row["failed"] == failed
    assert row["times"]["ours"]["blocks"] == 5 * (1 + earlier)
    assert set(row["times"]) == {"ours", "copy"}
    assert row["times"]["ours"]["median_us"] == pytest.approx(2)
    assert row["times"]["ours"]["calls"] == 10_000 * row["times"]["ours"]["blocks"]  # 20 ms each
    assert row["times"]["ours"]["wrong"] == 2
    assert row["algbw"] == pytest.approx((1 << 20) / 2e-6 / 1e9)


def test_a_ratio_is_of_the_same_rounds_and_a_competitor_of_some_jobs_has_none() -> None:
    found = {
        "ours": Blocks([1e-6, 10e-6, 1e-6], 3),
        "mpich": Blocks([2e-6, 20e-6, 3e-6], 3),  # the machine was slow in the second round
        "late": Blocks([1e-6], 1),
    }
    row = row_of(Case("alltoallv", 1024), 2, found, {})
    assert set(row["times"]) == {"ours", "mpich"}
    assert row["times"]["mpich"]["ratio"] == pytest.approx(2)
    assert row["times"]["mpich"]["median_us"] == pytest.approx(3)


def test_several_jobs_add_their_blocks_to_one_line(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    once = measured(tmp_path, *QUICK, "--bytes", "1K,1K", "--iters", "100")["rows"]
    done = alltoallv("bench", *QUICK, "--bytes", "1K,1K", "--iters", "100", "--jobs", "3", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if line and not line.startswith("#")]) == 3
    rows = json.loads(path.read_text())["rows"]
    for row in rows:
        check_row(row, {"ours", "copy", "copy-nt"})
    assert [row["times"]["ours"]["blocks"] for row in rows] == [3 * row["times"]["ours"]["blocks"] for row in once]


def test_interrupt_ends_every_process_and_keeps_what_was_measured(tmp_path: Path) -> None:
    """Ranks are found by their environment, which names the folder that the coordinator made."""
    path = tmp_path / "out.json"
    bench_run = subprocess.Popen(
        [*COMMAND, "--np", "2", "--bytes", "1K", "--seconds", "100", "--peers", "", "--json", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "ALLTOALLV_BENCH_MARK": (mark := f"mark-{os.getpid()}-{time.monotonic_ns()}")},
    )

    def marked() -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    end = time.monotonic() + 60
    while len(marked()) < 4 and time.monotonic() < end:  # coordinator, guard, launcher, ranks
        time.sleep(0.1)
    assert len(marked()) >= 4
    bench_run.send_signal(signal.SIGINT)
    output, _ = bench_run.communicate(timeout=60)
    assert bench_run.returncode == 130, output
    end = time.monotonic() + 30
    while marked() and time.monotonic() < end:
        time.sleep(0.1)
    assert marked() == []
    assert b"Traceback" not in output
    document = json.loads(path.read_text())
    assert (document["complete"], document["rows"]) == (False, [])


@SLOW
@pytest.mark.timeout(900)
@pytest.mark.parametrize("collective", ["alltoallv", "allgather", "allreduce"])
def test_peers_give_the_same_results(collective: str, tmp_path: Path) -> None:
    """MPICH, Open MPI and Intel MPI in environments of their own, which are made here if they can be."""

    def say(text: str) -> None:
        print(text)

    peers = []
    for name in ("mpich", "openmpi", "impi"):
        try:
            environments.find_or_make(name, say)
            peers.append(name)
        except environments.Unavailable as error:
            print(error)
    assert peers, "no peer's environment could be made: see the output"
    arguments = ["--np", "2,3", "--bytes", "1K,300K", "--seconds", "0.05", "--peers", ",".join(peers)]
    for row in measured(tmp_path, collective, *arguments, limit=600)["rows"]:
        check_row(row, {"ours", "copy", "copy-nt", *peers})


@SLOW
def test_overhead_by_interface(tmp_path: Path) -> None:
    for row in measured(tmp_path, "overhead", "--np", "2", "--seconds", "0.05")["rows"]:
        assert row["nbytes"] == 0
        assert {"ours", "ours-plan", "ours-numpy"} <= set(row["times"])
