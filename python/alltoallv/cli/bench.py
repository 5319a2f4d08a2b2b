"""``bench``: measures the collectives against peers and against what the memory allows."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alltoallv.bench.cases import COLLECTIVES, PATTERNS, Case, parse_bytes

PEERS = ("gloo",)
SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``bench``."""
    parser.add_argument("collective", nargs="?", default="alltoallv", choices=COLLECTIVES)
    parser.add_argument("--np", default="2,4", help="world sizes, such as 2,4,8 (default: %(default)s)")
    parser.add_argument(
        "--bytes", default="1K..64M", help="payload of a rank: 1K,64K or 1K..64M (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="float32", help="as NumPy names it (default: %(default)s)")
    parser.add_argument("--pattern", default="uneven", choices=PATTERNS, help="how bytes divide (default: %(default)s)")
    parser.add_argument("--api", default="numpy", choices=("numpy", "plan", "torch"), help="(default: %(default)s)")
    parser.add_argument(
        "--output",
        default="allocated",
        choices=("allocated", "empty", "private"),
        help="by the operator, alltoallv.empty(), or ordinary memory (default: %(default)s)",
    )
    parser.add_argument("--peers", help="comma-separated: gloo (default: those installed)")
    parser.add_argument("--seconds", type=float, default=2.0, help="per line of the table (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, schema in docs/bench.md")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there, as PNG")


def main(args: argparse.Namespace) -> int:
    """Runs the benchmark; exits with 1 if any result was wrong."""
    try:
        sizes = [int(n) for n in args.np.split(",")]
        cases = [Case(args.collective, n, args.dtype, args.pattern, args.output) for n in parse_bytes(args.bytes)]
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    peers = installed_peers() if args.peers is None else [p for p in args.peers.split(",") if p]
    if unknown := set(peers) - set(PEERS):
        print(f"bench: --peers has {', '.join(sorted(unknown))}, expected {', '.join(PEERS)}", file=sys.stderr)
        return 2
    machine = {"cpus": len(os.sched_getaffinity(0)), "machine": platform.machine(), "kernel": platform.release()}
    rows: list[dict[str, Any]] = []
    print(header(args, peers, machine))
    for size in sizes:
        config = {"api": args.api, "peers": peers, "seconds": args.seconds, "cases": [c.asdict() for c in cases]}
        for done, row in enumerate(run_job(size, config), 1):
            rows.append(row)
            clear_progress()
            print(line(row, peers), flush=True)
            progress(done, len(cases), size)
        clear_progress()
    if len(rows) < len(sizes) * len(cases):
        print("bench: the job ended early; what it printed is above", file=sys.stderr)
        return 1
    if args.json:
        document = {"schema": SCHEMA, "machine": machine, "api": args.api, "rows": rows}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if args.plot:
        plot(rows, peers, args.plot)
    return int(any(t["wrong"] for row in rows for t in row["times"].values()))


def installed_peers() -> list[str]:
    """The peers whose libraries are here."""
    return ["gloo"] if importlib.util.find_spec("torch") else []


def run_job(size: int, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields what rank 0 measures, as it comes."""
    command = [sys.executable, "-m", "alltoallv", "run", "-n", str(size), "--no-prefix", "-m", "alltoallv.bench.rank"]
    with subprocess.Popen([*command, json.dumps(config)], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for text in job.stdout:
            if text.startswith("{"):
                yield json.loads(text)
            else:
                print(text, end="", file=sys.stderr)


def header(args: argparse.Namespace, peers: list[str], machine: dict[str, Any]) -> str:
    """The columns of nccl-tests, then the peers' times and how many times slower than ours they are."""
    about = (
        f"# {args.collective} {args.dtype} {args.pattern}, api {args.api}, output {args.output}; "
        f"{machine['cpus']} cpus, {machine['machine']}, Linux {machine['kernel']}\n"
        "# time: median in us, of the slowest rank; algbw, busbw: GB/s; x: peer's time / ours; limit: one copy\n"
    )
    columns = f"{'np':>3} {'size(B)':>10} {'count':>10} {'type':>9} {'time':>10} {'min':>10} {'p90':>10}"
    columns += f" {'algbw':>7} {'busbw':>7} {'#wrong':>6}"
    for peer in [*peers, "limit"]:
        columns += f" {peer:>10} {'x':>7}"
    return about + columns


def line(row: dict[str, Any], peers: list[str]) -> str:
    """One row of the table."""
    ours = row["times"]["ours"]
    wrong = sum(t["wrong"] for t in row["times"].values())
    text = f"{row['np']:>3} {row['nbytes']:>10} {row['count']:>10} {row['dtype']:>9}"
    text += f" {ours['median_us']:>10.2f} {ours['min_us']:>10.2f} {ours['p90_us']:>10.2f}"
    text += f" {row['algbw']:>7.2f} {row['busbw']:>7.2f} {wrong:>6}"
    for peer in [*peers, "limit"]:
        time = row["times"][peer]["median_us"]
        text += f" {time:>10.2f} {time / ours['median_us']:>7.2f}"
    return text


def progress(done: int, total: int, size: int) -> None:
    """A bar on the terminal, and nothing in a file."""
    if sys.stderr.isatty():
        filled = 30 * done // total
        print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {size} ranks, {done} of {total}", end="", file=sys.stderr)
        sys.stderr.flush()


def clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)


def plot(rows: list[dict[str, Any]], peers: list[str], path: Path) -> None:
    """Time over size, one panel per world size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = sorted({row["np"] for row in rows})
    figure, axes = plt.subplots(1, len(sizes), figsize=(5 * len(sizes), 4), sharey=True, squeeze=False)
    for axis, size in zip(axes[0], sizes, strict=True):
        mine = [row for row in rows if row["np"] == size]
        for name in ["ours", *peers, "limit"]:
            style = "k--" if name == "limit" else "o-"
            times = [row["times"][name]["median_us"] for row in mine]
            axis.loglog([row["nbytes"] for row in mine], times, style, label=name)
        axis.set_title(f"{size} ranks")
        axis.set_xlabel("payload of a rank (bytes)")
        axis.grid(True, which="both", alpha=0.3)
    axes[0][0].set_ylabel("median time (us)")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
