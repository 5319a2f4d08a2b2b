"""Faults and random collectives for as long as you like: ``python tests/soak --seconds 3600``.

With ``--jobs`` it starts jobs side by side, with others nested in them, whose ranks differ in options and whose limits
change; else it has faults in one job after the other. Prints the seed, with which the run can be repeated, and a table
in Markdown; exits with 1 if there was a hang, a wrong value, a leak or another surprise.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import tempfile
from pathlib import Path

import jobs
from soak import KINDS, Table, episodes, soak

from alltoallv.testing import Ranks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long (default: 60)")
    parser.add_argument("--jobs", action="store_true", help="jobs side by side and nested; the next four do not count")
    parser.add_argument("--faults", type=int, default=1 << 30, help="stop after so many")
    parser.add_argument("--operators", type=int, default=400, help="at most so many before each fault (default: 400)")
    parser.add_argument("--front-end", action="append", choices=("numpy", "torch", "mindspore", "paddle"), default=[])
    parser.add_argument("--kind", action="append", choices=list(KINDS), default=[], help="of fault; default: all")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help="default: another each time")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's job in the background would ignore the first
        signal.signal(number, signal.default_int_handler)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        found = (run_jobs if options.jobs else run_faults)(options, Path(folder))
    failures = found.failures()
    print(*failures[:50], sep="\n", file=sys.stderr)
    return bool(failures)


def run_jobs(options: argparse.Namespace, folder: Path) -> jobs.Found:
    """Waves of jobs, and their table."""
    found = jobs.Found()
    try:
        jobs.soak(jobs.waves(options.seed), found, folder, options.seed, options.seconds)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        print(*found.lines(), sep="\n", flush=True)
    return found


def run_faults(options: argparse.Namespace, folder: Path) -> Table:
    """Episodes of faults, and their table."""
    front_ends = options.front_end or ["numpy"]
    ranks = Ranks(["episode", *(f"alltoallv.{name}" for name in front_ends if name in ("numpy", "torch"))])
    table = Table()
    plans = episodes(options.seed, front_ends, folder, options.operators, options.kind or list(KINDS))
    try:
        soak(ranks, plans, table, options.seconds, options.faults)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        print(*table.lines(), sep="\n", flush=True)
    return table


if __name__ == "__main__":
    sys.exit(main())
