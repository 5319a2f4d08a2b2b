"""Measures everything that docs/performance.md shows, and writes it, with plots. About half an hour.

python docs/measure.py            what has not been measured yet, or otherwise than now, then the page
python docs/measure.py --fresh    all of it anew
python docs/measure.py --report   only the page, from what is there
python docs/measure.py --quick    short blocks, to try the script; all that it writes lies in docs/measured/quick/

Results lie in docs/measured/, one JSON file per run, written when the run is complete and all its results are right:
interrupted, the script goes on where it was. Needs this package with matplotlib; pip makes the peers' environments
(docs/bench.md). Ends with 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from performance_page import write_page

from alltoallv_tools.bench import environments, report
from alltoallv_tools.cli import bench

DOCS = Path(__file__).resolve().parent
MEASURED = DOCS / "measured"
MPI = "mpich,openmpi,impi"


@dataclass(frozen=True)
class Run:
    """One call of ``bench``; ``environment`` is that of the interpreter, where it matters."""

    name: str
    arguments: str
    peers: str = ""
    seconds: float = 2.0
    environment: str = ""
    lines: int = 1

    def argv(self, quick: bool) -> list[str]:
        """As `bench.given` has it, which its file tells."""
        peers = [] if self.arguments == "kernels" else ["--peers", self.peers]
        parser = argparse.ArgumentParser()
        bench.add_arguments(parser)
        seconds = 0.1 if quick else self.seconds
        return bench.given(parser.parse_args([*self.arguments.split(), *peers, "--seconds", str(seconds)]))


# Twice each, minutes apart, so that a slow spell of the machine meets one of both.
FITTED = ",".join(2 * ["2K,4K,8K,16K,32K,64K,128K,256K,512K,1M,2M,3M,4M,6M,8M,11M,16M,23M,32M,45M,64M"])
SIZES = "1K,16K,256K,4M,16M,64M"
EVERY = f"--np 2,4,8 --bytes {SIZES}"
RUNS = (
    Run("overhead", "overhead --np 1,2,4", environment="torch", lines=3),
    # Into `empty()` outputs, as the peers receive into arrays made once; what the operator allocates alternates.
    Run("float32", f"alltoallv --api plan {EVERY} --output empty", MPI, 3.0, lines=18),
    Run("int8", f"alltoallv --api plan {EVERY} --output empty --dtype int8", MPI, 3.0, lines=18),
    Run("allocated", f"alltoallv --api plan {EVERY}", MPI, lines=18),
    Run("gloo", f"alltoallv --api torch {EVERY} --output empty", "gloo", lines=18),
    # Every peer is called as ours is: MPI with arrays, gloo with tensors.
    Run("private", f"alltoallv --api plan {EVERY},64K,128K --output private", MPI, 2.5, lines=24),
    Run("private-gloo", f"alltoallv --api torch {EVERY},64K,128K --output private", "gloo", lines=24),
    Run(
        "cycle",
        f"alltoallv --api plan --np 2,4 --bytes {SIZES},64K,128K,1M --output empty --variant cycle",
        MPI,
        3.0,
        lines=18,
    ),
    Run("allreduce", "allreduce --np 2,4 --bytes 1M,16M,64M", f"gloo,{MPI}", 3.0, lines=6),
    Run("quantized", "quantized --np 2,4 --bytes 1M,16M,64M", f"gloo,{MPI}", 3.0, lines=6),
    Run("sparse", "alltoallv --api plan --np 8 --bytes 256K --pattern sparse"),
    Run("mindspore-gather", "allgather --api mindspore --np 2 --bytes 64000000", "mindspore", 6.0),
    Run("mindspore-reduce", "allreduce --api mindspore --np 2 --bytes 64000000", "mindspore", 8.0),
    Run("mindspore-quantized", "quantized --api mindspore --np 2 --bytes 64000000", "mindspore", 8.0),
    Run("fit", f"alltoallv --api plan --np 2,4,8 --bytes {FITTED} --pattern uniform --output empty", lines=126),
    Run("kernels", "kernels", seconds=1.0, lines=12),
)


def measure(run: Run, home: Path, quick: bool) -> str:
    """Runs it; returns why it failed, or nothing."""
    try:
        python = environments.find_or_make(run.environment, say) if run.environment else Path(sys.executable)
    except environments.Unavailable as error:
        return str(error)
    partial = home / f"{run.name}.partial"
    command = [str(python), "-m", "alltoallv", "bench", *run.argv(quick), "--json", str(partial)]
    code = subprocess.run(command, check=False, env=environment(home)).returncode
    if code == 130:
        raise KeyboardInterrupt
    if code:
        return f"bench ended with code {code}: a result is wrong, or lines are missing; see {partial}"
    partial.rename(home / f"{run.name}.json")
    return ""


def environment(home: Path) -> dict[str, str]:
    """The package as it lies here, for interpreters of other environments too."""
    packages = home / "package"
    packages.mkdir(exist_ok=True)
    return {**os.environ, "PYTHONPATH": str(environments.own_package(packages))}


def measured(run: Run, home: Path, quick: bool) -> dict[str, Any] | None:
    """The run's document; None if there is none, or one of other arguments."""
    try:
        document: dict[str, Any] = json.loads((home / f"{run.name}.json").read_text())
    except FileNotFoundError:
        return None
    return document if document.get("argv") == run.argv(quick) else None


def say(text: str) -> None:
    print(f"# {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument("--quick", action="store_true", help="short blocks, to try the script")
    parser.add_argument("--report", action="store_true", help="write the page only")
    parser.add_argument("--only", metavar="NAMES", help=f"of {','.join(run.name for run in RUNS)}")
    args = parser.parse_args()
    home = MEASURED / "quick" if args.quick else MEASURED
    home.mkdir(exist_ok=True)
    names = [run.name for run in RUNS] if args.only is None else args.only.split(",")
    if unknown := set(names) - {run.name for run in RUNS}:
        parser.error(f"--only has {', '.join(sorted(unknown))}")
    chosen = [] if args.report else [run for run in RUNS if run.name in names]
    if args.fresh:
        for run in chosen:
            (home / f"{run.name}.json").unlink(missing_ok=True)
    todo = [run for run in chosen if measured(run, home, args.quick) is None]
    bar = report.Progress(sum(run.lines for run in todo))
    started = time.monotonic()
    failed = False
    for run in todo:
        say(f"{run.name}: bench {run.arguments}, {time.monotonic() - started:.0f} s so far")
        bar.step(run.name, done=False)
        if reason := measure(run, home, args.quick):
            say(f"{run.name}: {reason}")
            failed = True
        for _ in range(run.lines):
            bar.step(run.name)
    bar.clear()
    found = {run.name: measured(run, home, args.quick) for run in RUNS}
    page = write_page(home if args.quick else DOCS, {name: each for name, each in found.items() if each})
    say(f"{page} is written; {time.monotonic() - started:.0f} s")
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted; the same command, without --fresh, goes on from here")
        sys.exit(130)
