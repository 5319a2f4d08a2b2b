"""Measures everything that docs/performance.md shows, and writes that page. About 25 minutes.

python docs/measure.py            what has not been measured yet, or otherwise than now, then the page
python docs/measure.py --fresh    all of it anew
python docs/measure.py --report   only the page, from what is there
python docs/measure.py --quick    short blocks, to try the script; all that it writes lies in docs/measured/quick/

Two sections are added by scripts of their own, afterwards: docs/measure_steps.py and, as root, docs/measure_hosts.py,
both with --keep.

The figures lie in docs/measured.json (see performance_page.py), where each run is kept when it is complete and all
its results are right: interrupted, the script goes on where it was. All are of one machine: another machine's are
dropped. Raw results lie in docs/measured/, which git ignores. pip makes the peers' environments (docs/bench.md). Ends
with 1 if a run failed.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import performance_page as pages
import pictures

import alltoallv
from alltoallv_tools.bench import environments, report
from alltoallv_tools.bench.cases import COLLECTIVES
from alltoallv_tools.cli import bench

DOCS = Path(__file__).resolve().parent
MEASURED = DOCS / "measured"
MPI = "mpich,openmpi,impi"


@dataclass(frozen=True)
class Run:
    """One call of ``bench``; ``environment`` is the interpreter's, where it matters."""

    name: str
    arguments: str
    peers: str = ""
    seconds: float = 2.0
    environment: str = ""

    def argv(self, quick: bool) -> list[str]:
        """As `bench.arguments_of` has it, which its file tells."""
        peers = [] if self.arguments.startswith(("kernels", "backend")) else ["--peers", self.peers]
        parser = argparse.ArgumentParser()
        bench.add_arguments(parser)
        seconds = 0.1 if quick else self.seconds
        return bench.arguments_of(parser.parse_args([*self.arguments.split(), *peers, "--seconds", str(seconds)]))


SIZES = "1K,16K,256K,1M,4M,16M,64M"
FITTED = "2K,4K,8K,16K,32K,64K,128K,256K,512K,1M,2M,3M,4M,6M,8M,11M,16M,23M,32M,45M,64M"
WAYS = "--ways --jobs 2"  # where memory lies, and so which caches it shares, changes from job to job
RUNS = (
    Run("calls", "overhead --np 2 --bytes 1K", f"{MPI},gloo", environment="torch"),
    Run("backend", "backend --np 2", environment="torch"),
    # Into `empty()` outputs, as the peers receive into arrays made once; what the operator allocates alternates.
    Run("plan", f"alltoallv --api plan --np 2,4,8 --bytes {SIZES} --output empty {WAYS}", MPI, 4.0),
    # Every peer is called as ours is: MPI with arrays, gloo with tensors.
    Run("function", f"alltoallv --np 2,4,8 --bytes {SIZES} {WAYS}", MPI, 4.0),
    Run("private", f"alltoallv --np 2,4,8 --bytes {SIZES} --output private {WAYS}", MPI, 4.0),
    Run("cycle", f"alltoallv --api plan --np 2,4,8 --bytes {SIZES} --output empty --variant cycle {WAYS}", MPI, 4.0),
    Run("torch", f"alltoallv --api torch --np 2,4 --bytes {SIZES}", "gloo"),
    Run("allreduce", "allreduce --np 2,4 --bytes 1K,64K,1M,16M,64M", f"gloo,{MPI}", 3.0),
    Run("quantized", "quantized --np 2,4 --bytes 1M,16M,64M", f"gloo,{MPI}", 3.0),
    Run("mindspore-gather", "allgather --api mindspore --np 2 --bytes 64000000", "mindspore", 6.0, "mindspore"),
    Run("mindspore-reduce", "allreduce --api mindspore --np 2 --bytes 64000000", "mindspore", 8.0, "mindspore"),
    Run("mindspore-quantized", "quantized --api mindspore --np 2 --bytes 64000000", "mindspore", 8.0, "mindspore"),
    Run("fit", f"alltoallv --api plan --np 2,4,8 --bytes {FITTED} --pattern uniform --output empty", seconds=1.0),
    Run("kernels", "kernels", seconds=1.0),
)


def command(argv: list[str]) -> str:
    """Returns the command, quoted for a shell."""
    return f"python -m alltoallv bench {shlex.join(argv)}"


def measure(run: Run, home: Path, quick: bool) -> dict[str, Any]:
    """Returns what `bench --json` writes.

    Raises:
        environments.Unavailable: it failed; the text explains why.
    """
    python = environments.find_or_make(run.environment, say) if run.environment else sys.executable
    raw, packages = home / f"{run.name}.json", home / "package"
    packages.mkdir(exist_ok=True)
    # The package as it lies here, for interpreters of other environments too.
    env = {**os.environ, "PYTHONPATH": str(environments.own_package(packages))}
    arguments = [*run.argv(quick), "--json", str(raw)]
    code = subprocess.run([str(python), "-m", "alltoallv", "bench", *arguments], check=False, env=env).returncode
    if code == 130:
        raise KeyboardInterrupt
    if code:
        reason = f"bench ended with code {code}: a result is wrong, or lines are missing; see {raw}"
        raise environments.Unavailable(reason)
    document: dict[str, Any] = json.loads(raw.read_text())
    return document


def condense(document: dict[str, Any]) -> pages.Run:
    """What is kept of a run that ended just now."""
    rows = document["rows"]
    flat = [condense_row(row) for row in rows]
    columns = list(dict.fromkeys(itertools.chain(*flat)))
    failed = {party: why for row in rows for party, why in row.get("failed", {}).items()}
    return {
        "command": command(document["argv"]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "load": document["machine"]["load"],
        **({"failed": failed} if failed else {}),
        "columns": columns,
        "rows": [[row.get(column) for column in columns] for row in flat],
    }


def condense_row(row: report.Row) -> dict[str, Any]:
    """By column; with more digits than the page shows, so that rounding twice changes none."""
    if "kernel" in row:
        keys: tuple[str, ...] = ("kernel", "nbytes")
        figures = {name: times["GB/s"] for name, times in row["times"].items()}
    else:
        keys, ours = ("np", "nbytes"), row["times"]["ours"]
        if row["collective"] not in COLLECTIVES:  # several calls of one size
            keys = ("np", "collective", "nbytes")
        figures = {"GB/s": row["algbw"], "us": ours["median_us"], "min": ours["min_us"], "max": ours["max_us"]}
        others = {name: times for name, times in row["times"].items() if name != "ours"}
        figures |= {name: times["median_us"] for name, times in others.items()}
        figures |= {f"{name}/us": times["ratio"] for name, times in others.items()}
    return {key: row[key] for key in keys} | {name: round(figure, 7) for name, figure in figures.items()}


def versions() -> dict[str, str]:
    """Of this package, of NumPy, and of what the peers' environments have."""
    found = {"alltoallv": alltoallv.__version__, "numpy": metadata.version("numpy")}
    script = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    for name, wanted in environments.REQUIREMENTS.items():
        if environments.is_ready(name):
            packages = [re.split("[<>=]", requirement)[0] for requirement in wanted[1:]]
            command = [str(environments.find_or_make(name, say)), "-c", script, *packages]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found |= zip(packages, output.split(), strict=True)
    return found


def keep(name: str, document: dict[str, Any], path: Path) -> None:
    """Adds a run to the figures; another machine's are dropped."""
    machine = {key: value for key, value in document["machine"].items() if key != "load"}
    figures = pages.load(path)
    runs = figures["runs"] if figures.get("machine") == machine else {}
    runs[name] = condense(document)
    pages.save({"machine": machine, "versions": versions(), "runs": runs}, path)


def is_measured(run: Run, figures: pages.Figures, quick: bool) -> bool:
    """Whether there are its figures, with these arguments, of this machine."""
    kept, machine = figures["runs"].get(run.name), report.machine()
    same = kept is not None and kept["command"] == command(run.argv(quick))
    return same and figures["machine"].items() <= machine.items()


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
    home.mkdir(parents=True, exist_ok=True)
    docs = home if args.quick else DOCS
    path, page = docs / "measured.json", docs / "performance.md"
    names = {run.name for run in RUNS}
    only = names if args.only is None else set(args.only.split(","))
    if unknown := only - names:
        parser.error(f"--only has {', '.join(sorted(unknown))}")
    chosen = [] if args.report else [run for run in RUNS if run.name in only]
    figures = pages.load(path)
    if args.fresh:
        figures["runs"] = {name: run for name, run in figures["runs"].items() if name not in only}
        pages.save(figures, path)
    started, failed = time.monotonic(), False
    for run in chosen:
        if is_measured(run, figures, args.quick):
            continue
        say(f"{run.name}: bench {run.arguments}, {time.monotonic() - started:.0f} s so far")
        try:
            keep(run.name, measure(run, home, args.quick), path)
        except environments.Unavailable as error:
            say(f"{run.name}: {error}")
            failed = True
    page.write_text(pages.page(pages.load(path)))
    if not args.quick:
        pictures.main()
    say(f"{page} is written; {time.monotonic() - started:.0f} s")
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted; the same command, without --fresh, goes on from here")
        sys.exit(130)
