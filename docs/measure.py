"""Measures everything that docs/performance.md shows, and writes it, with plots. About a quarter of an hour.

python docs/measure.py            what has not been measured yet, then the page
python docs/measure.py --fresh    all of it anew
python docs/measure.py --quick    short blocks, to try the script
python docs/measure.py --report   only the page, from what is there

Results lie in docs/measured/, one JSON file per run, written when the run is complete: interrupted, the script goes on
where it was. Needs this package with matplotlib; pip makes the peers' environments (docs/bench.md).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from performance_page import write_page

from alltoallv.bench import environments, report

DOCS = Path(__file__).resolve().parent
MEASURED = DOCS / "measured"
MPI = "mpich,openmpi,impi"


@dataclass(frozen=True)
class Run:
    """One call of ``bench``; ``environment`` is that of the interpreter, where it matters."""

    name: str
    arguments: tuple[str, ...]
    peers: str = ""
    seconds: float = 2.0
    environment: str = ""
    lines: int = 1
    needs: tuple[str, ...] = field(default=())


SIZES = "1K,16K,256K,4M,16M,64M"
RUNS = (
    Run("overhead", ("overhead", "--np", "1,2,4"), environment="torch", lines=3),
    # Into `empty()` outputs, as the peers receive into arrays made once; what the operator allocates alternates.
    Run(
        "float32",
        ("alltoallv", "--api", "plan", "--np", "2,4,8", "--bytes", SIZES, "--output", "empty"),
        MPI,
        3.0,
        lines=18,
    ),
    Run(
        "int8",
        ("alltoallv", "--api", "plan", "--np", "2,4,8", "--bytes", SIZES, "--output", "empty", "--dtype", "int8"),
        MPI,
        3.0,
        lines=18,
    ),
    Run(
        "allocated",
        ("alltoallv", "--api", "plan", "--np", "2,4,8", "--bytes", SIZES),
        MPI,
        2.0,
        lines=18,
    ),
    Run(
        "gloo",
        ("alltoallv", "--api", "torch", "--np", "2,4,8", "--bytes", SIZES, "--output", "empty"),
        "gloo",
        2.0,
        lines=18,
    ),
    Run(
        "private",
        ("alltoallv", "--api", "torch-plan", "--np", "2,4,8", "--bytes", f"{SIZES},64K,128K", "--output", "private"),
        f"gloo,{MPI}",
        2.5,
        lines=24,
    ),
    Run(
        "cycle",
        (
            "alltoallv",
            "--api",
            "plan",
            "--np",
            "2",
            "--bytes",
            f"{SIZES},64K,128K,1M",
            "--output",
            "empty",
            "--variant",
            "cycle",
        ),
        MPI,
        3.0,
        lines=9,
    ),
    Run("allreduce", ("allreduce", "--np", "2,4", "--bytes", "1M,16M,64M"), f"gloo,{MPI}", 3.0, lines=6),
    Run("quantized", ("quantized", "--np", "2,4", "--bytes", "1M,16M,64M"), f"gloo,{MPI}", 3.0, lines=6),
    Run("sparse", ("alltoallv", "--api", "plan", "--np", "8", "--bytes", "256K", "--pattern", "sparse"), lines=1),
    Run(
        "mindspore-gather",
        ("allgather", "--api", "mindspore", "--np", "2", "--bytes", "64000000"),
        "mindspore",
        6.0,
        lines=1,
        needs=("mindspore",),
    ),
    Run(
        "mindspore-reduce",
        ("allreduce", "--np", "2", "--bytes", "64000000"),
        "mindspore",
        8.0,
        lines=1,
        needs=("mindspore",),
    ),
    Run("fit", ("alltoallv", "--api", "plan", "--np", "2,4", "--bytes", "1K..64M"), lines=18),
    Run("kernels", ("kernels",), seconds=1.0, lines=12),
)


def measure(run: Run, quick: bool) -> str:
    """Runs it; returns why it failed, or nothing."""
    try:
        python = environments.find_or_make(run.environment, say) if run.environment else Path(sys.executable)
        for name in run.needs:
            environments.find_or_make(name, say)
    except environments.Unavailable as error:
        return str(error)
    partial = MEASURED / f"{run.name}.partial"
    command = [str(python), "-m", "alltoallv", "bench", *run.arguments, "--json", str(partial)]
    command += ["--seconds", str(0.2 if quick else run.seconds)]
    if run.arguments[0] != "kernels":
        command += ["--peers", run.peers]
    code = subprocess.run(command, check=False, env=environment()).returncode
    if code == 130:
        raise KeyboardInterrupt
    if not partial.exists():
        return f"bench ended with code {code}"
    partial.rename(MEASURED / f"{run.name}.json")
    return "" if code == 0 else f"bench ended with code {code}: a result is wrong, or lines are missing"


def environment() -> dict[str, str]:
    """The package as it lies here, for interpreters of other environments too."""
    packages = MEASURED / "package"
    packages.mkdir(exist_ok=True)
    return {**os.environ, "PYTHONPATH": str(environments.own_package(packages))}


def say(text: str) -> None:
    print(f"# {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument("--quick", action="store_true", help="short blocks, to try the script")
    parser.add_argument("--report", action="store_true", help="write the page only")
    parser.add_argument("--only", help="comma-separated names of runs")
    args = parser.parse_args()
    MEASURED.mkdir(exist_ok=True)
    chosen = [run for run in RUNS if args.only is None or run.name in args.only.split(",")]
    if args.fresh:
        for run in chosen:
            (MEASURED / f"{run.name}.json").unlink(missing_ok=True)
    todo = [] if args.report else [run for run in chosen if not (MEASURED / f"{run.name}.json").exists()]
    bar = report.Progress(sum(run.lines for run in todo))
    started = time.monotonic()
    for run in todo:
        say(f"{run.name}: bench {' '.join(run.arguments)}, {time.monotonic() - started:.0f} s so far")
        bar.step(run.name, done=False)
        if reason := measure(run, args.quick):
            say(f"{run.name}: {reason}")
        for _ in range(run.lines):
            bar.step(run.name)
    bar.clear()
    documents: dict[str, Any] = {}
    commands: dict[str, str] = {}
    for run in RUNS:
        path = MEASURED / f"{run.name}.json"
        commands[run.name] = f"bench {' '.join(run.arguments)}" + (f" --peers {run.peers}" if run.peers else "")
        if path.exists():
            documents[run.name] = json.loads(path.read_text())
    write_page(DOCS, documents, commands)
    say(f"docs/performance.md is written; {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        sys.exit(130)
