"""Writes docs/performance.md and its plot: runs the benchmarks and puts their tables in. Needs torch and matplotlib.

python docs/measure.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent

RUNS: list[tuple[str, str, list[str]]] = [
    (
        "Overhead of a call: 1 KiB through alltoallv.torch",
        "Output allocated by the operator, counts given as lists.",
        ["alltoallv", "--api", "torch", "--np", "2,4", "--bytes", "0,1K,16K"],
    ),
    (
        "all_to_all_v through alltoallv.torch",
        "float32, uneven counts, output allocated by the operator.",
        ["alltoallv", "--api", "torch", "--np", "2,4,8", "--bytes", "1K..64M"],
    ),
    (
        "all_to_all_v, a plan that is reused",
        "The same with a plan that is made once, called on the same buffers.",
        ["alltoallv", "--api", "plan", "--np", "2,4,8", "--bytes", "1K..64M"],
    ),
    (
        "all_to_all_v into ordinary memory",
        "The output is private: the receiver reads the sender's memory (path cma).",
        ["alltoallv", "--api", "torch", "--np", "2,4", "--bytes", "1K..64M", "--output", "private"],
    ),
    (
        "all_reduce of float32",
        "Sum in the order of ranks; gloo reduces in place, which costs it one copy here.",
        ["allreduce", "--api", "torch", "--np", "2,4", "--bytes", "1K..64M"],
    ),
]


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def measure(arguments: list[str], quick: bool, plot: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "out.json")
        command = [sys.executable, "-m", "alltoallv", "bench", *arguments, "--peers", "gloo", "--json", str(path)]
        command += ["--seconds", "0.3" if quick else "2"]
        if plot:
            command += ["--plot", str(plot)]
        subprocess.run(command, check=True)
        document: dict[str, Any] = json.loads(path.read_text())
        return document


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | bytes | ours us (min, p90) | algbw GB/s | #wrong | gloo us | gloo / ours | one copy us |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        ours, gloo, limit = (row["times"][name] for name in ("ours", "gloo", "limit"))
        lines.append(
            f"| {row['np']} | {row['nbytes']} | {ours['median_us']:.1f} ({ours['min_us']:.1f}, {ours['p90_us']:.1f}) "
            f"| {row['algbw']:.2f} | {sum(t['wrong'] for t in row['times'].values())} | {gloo['median_us']:.1f} "
            f"| {gloo['median_us'] / ours['median_us']:.1f} | {limit['median_us']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short runs, to try the script")
    parser.add_argument("--runs", type=int, default=len(RUNS), metavar="N", help="only the first N tables")
    args = parser.parse_args()
    quick = args.quick
    load = os.getloadavg()[0]
    text = [
        "# Performance",
        "",
        "Written by `python docs/measure.py`; what the columns mean stands in [bench.md](bench.md). Ours, gloo and the "
        "copy are measured in turns in one run; compare ratios. Medians of the slowest rank.",
        "",
    ]
    for number, (title, about, arguments) in enumerate(RUNS[: args.runs]):
        plot = DOCS / "performance.png" if number == 1 else None
        document = measure(arguments, quick, plot)
        if number == 0:
            machine = document["machine"]
            text += [
                f"Machine: {processor()}, {machine['cpus']} processors, Linux {machine['kernel']}; load "
                f"average {load:.1f} when the measurement began.",
                "",
            ]
            text += ["With more ranks than processors, ranks share them and wait for each other's turn.", ""]
        text += [f"## {title}", "", about, "", f"`python -m alltoallv bench {' '.join(arguments)} --peers gloo`", ""]
        text += [table(document["rows"]), ""]
        if plot:
            text += [f"![time over size]({plot.name})", ""]
    (DOCS / "performance.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
