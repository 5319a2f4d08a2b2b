"""The benchmark runs, checks its results, writes what docs/bench.md describes, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alltoallv.bench import environments
from alltoallv.bench import rank as bench_rank
from alltoallv.bench.cases import Case
from alltoallv.bench.contenders import Prepared

COMMAND = [sys.executable, "-m", "alltoallv", "bench"]
QUICK = ["--np", "2", "--seconds", "0.05", "--peers", ""]


def bench(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, check=False)


def check_row(row: dict[str, Any], contenders: set[str]) -> None:
    assert row["failed"] == {}
    assert set(row["times"]) == contenders
    for times in row["times"].values():
        assert times["wrong"] == 0
        assert 0 < times["min_us"] <= times["median_us"] <= times["p90_us"] <= times["max_us"]
    assert row["count"] * np.dtype(row["dtype"]).itemsize == row["nbytes"]


@pytest.mark.parametrize("collective", ["alltoallv", "allgather", "allreduce"])
def test_table_and_json(collective: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["--np", "1,2", "--bytes", "0,1K,64K", "--seconds", "0.05", "--peers", "", "--json", str(path)]
    done = bench(collective, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    table = [text.split() for text in done.stdout.splitlines() if text and not text.startswith("#")]
    assert table[0][:7] == ["np", "size(B)", "count", "type", "time", "min", "max"]
    assert [(row[0], row[1]) for row in table[1:]] == [(n, b) for n in ("1", "2") for b in ("0", "1024", "65536")]
    document = json.loads(path.read_text())
    assert document["schema"] == 2
    assert document["machine"]["cpus"] == len(os.sched_getaffinity(0))
    assert len(document["rows"]) == 6
    for row in document["rows"]:
        check_row(row, {"ours", "copy", "copy-nt"})


@pytest.mark.parametrize("output", ["allocated", "empty", "private"])
def test_every_output_in_a_whole_cycle(output: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = bench(*QUICK, "--bytes", "20K", "--output", output, "--variant", "cycle", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["times"]["ours"]["wrong"] == 0
    assert row["variant"] == "cycle"


def test_a_plan_and_a_sparse_pattern(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = bench(*QUICK, "--bytes", "4K", "--api", "plan", "--pattern", "sparse", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    check_row(json.loads(path.read_text())["rows"][0], {"ours", "full", "copy", "copy-nt"})


def test_quantized(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = bench("quantized", *QUICK, "--bytes", "100K,3M", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    for row in json.loads(path.read_text())["rows"]:
        check_row(row, {"ours", "ours-full", "ours-fp32", "copy", "copy-nt"})


def test_kernels(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = bench("kernels", "--bytes", "64K", "--seconds", "0.05", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {row["kernel"] for row in rows} == {"quantize", "dequantize_sum", "sum_shared", "cast_float16"}
    assert not any(row["wrong"] for row in rows)


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plot(suffix: str, magic: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"out.{suffix}"
    done = bench(*QUICK, "--bytes", "1K,4K", "--plot", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize(
    "arguments", [["--bytes", "many"], ["--np", "two"], ["--np", "0"], ["--peers", "carrier-pigeon"]]
)
def test_bad_arguments_are_named(arguments: list[str]) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert arguments[1].split(",")[0] in done.stderr


def test_a_peer_that_has_no_such_collective_is_named() -> None:
    done = bench("alltoallv", "--peers", "mindspore")
    assert done.returncode == 2
    assert "mindspore, which has no alltoallv" in done.stderr


def test_a_peer_that_cannot_be_had_is_reported_and_left_out(tmp_path: Path) -> None:
    """Pip is told to use an index that is not there."""
    env = {**os.environ, "ALLTOALLV_BENCH_CACHE": str(tmp_path), "PIP_NO_INDEX": "1"}
    command = [*COMMAND, "--np", "2", "--bytes", "1K", "--seconds", "0.05", "--peers", "mpich"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "making an environment for mpich" in done.stderr
    assert "left out: mpich: no environment for mpich" in done.stderr
    assert not environments.is_ready("mpich") or "mpich" not in os.listdir(tmp_path)


def test_a_wrong_result_is_counted() -> None:
    case = Case("alltoallv", 4096)
    good = case.expected(0, 1)

    class Broken:
        rank, size = 0, 1

        def __init__(self) -> None:
            self.contenders = {"ours": self}

        def barrier(self) -> None:
            pass

        def prepare(self, case: Case) -> Prepared:
            return Prepared(lambda: None, lambda _: np.where(np.arange(1024) < 3, -1, good), case.input(0))

    server = bench_rank.Server(Broken())
    reply = server.answer({"do": "prepare", "contender": "ours", "case": case.asdict()})
    assert reply["wrong"] == 3


def test_interrupt_ends_every_process() -> None:
    """Ranks are found by their environment, which names the folder that the coordinator made."""
    bench_run = subprocess.Popen(
        [*COMMAND, "--np", "2", "--bytes", "1K", "--seconds", "100", "--peers", ""],
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


@pytest.mark.slow
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
    path = tmp_path / "out.json"
    arguments = ["--np", "2,3", "--bytes", "1K,300K", "--seconds", "0.05", "--peers", ",".join(peers)]
    done = bench(collective, *arguments, "--json", str(path), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in json.loads(path.read_text())["rows"]:
        check_row(row, {"ours", "copy", "copy-nt", *peers})


def test_overhead_by_interface(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = bench("overhead", "--np", "1,2", "--seconds", "0.05", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    for row in json.loads(path.read_text())["rows"]:
        assert row["nbytes"] == 0
        assert {"ours", "ours-plan", "ours-numpy"} <= set(row["times"])
