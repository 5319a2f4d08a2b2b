"""Compares this tree with another checkout of it, in which the core is built as well.

python docs/compare.py OTHER                    every run of docs/measure.py, without peers
python docs/compare.py OTHER --only plan,calls  these runs
python docs/compare.py OTHER --np 2             with 2 ranks only

The two trees take turns, a bench each, now this one first and now the other. Prints a table in Markdown: medians, and
how many times as fast a call is in this tree, which is the median of the turns' ratios, whose noise is the same; then a
line for each run, of all its calls. A run that the other tree does not have, or whose framework this Python does not
have, is named and left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import DOCS, RUNS, WAYS, Run

HERE = DOCS.parent
CHOSEN = {run.name: run for run in RUNS}
Times = dict[tuple[Any, ...], float]  # microseconds of a call, by ranks, call and bytes


def times(run: Run, tree: Path, seconds: float, ranks: str | None) -> Times:
    """What a run takes in a tree, with its own numbers of ranks unless ``ranks`` gives others.

    Raises:
        subprocess.CalledProcessError: the tree's bench failed; ``stderr`` explains why.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as raw:
        peers = [] if run.name in ("kernels", "backend") else ["--peers", ""]
        wanted = run.arguments.removesuffix(f" {WAYS}").split()
        if ranks is not None and "--np" in wanted:
            wanted[wanted.index("--np") + 1] = ranks
        arguments = [*wanted, *peers, "--seconds", str(seconds), "--json", raw.name]
        command = [sys.executable, "-m", "alltoallv", "bench", *arguments]
        env = {**os.environ, "PYTHONPATH": str(tree / "python")}
        subprocess.run(command, check=True, env=env, capture_output=True, text=True)
        return dict(itertools.chain.from_iterable(map(of_row, json.load(raw)["rows"])))


def of_row(row: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], float]]:
    for name, found in row["times"].items():
        if "kernel" in row and name not in ("numpy", "copy"):
            yield (1, f"{row['kernel']}, {name}", row["nbytes"]), row["nbytes"] / found["GB/s"] / 1e3
        elif name.startswith("ours"):
            yield (row["np"], row["collective"] + name.removeprefix("ours"), row["nbytes"]), found["median_us"]


def compare(run: Run, other: Path, turns: int, seconds: float, ranks: str | None = None) -> Iterator[tuple[str, float]]:
    """Yields the rows of the table, each with how many times as fast this tree is."""
    found: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for turn in range(turns):
        sides = ((0, HERE), (1, other))
        seen = {side: times(run, tree, seconds, ranks) for side, tree in (sides if turn % 2 == 0 else sides[::-1])}
        for key in seen[0].keys() & seen[1].keys():
            found[key].append((seen[0][key], seen[1][key]))
    for (size, call, nbytes), pairs in sorted(found.items()):
        now, then = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(theirs / mine for mine, theirs in pairs)
        yield f"| {run.name} {call} | {size} | {nbytes:,} | {now:.2f} | {then:.2f} | {ratio:.2f} |", ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--only", metavar="NAMES", help=f"of {','.join(CHOSEN)}")
    parser.add_argument("--np", metavar="RANKS", help="numbers of ranks, instead of the runs' own")
    parser.add_argument("--turns", type=int, default=5, help="of each tree (default: 5)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each case in a turn (default: 0.3)")
    args = parser.parse_args()
    names = list(CHOSEN) if args.only is None else args.only.split(",")
    if unknown := set(names) - set(CHOSEN):
        parser.error(f"--only has {', '.join(sorted(unknown))}; there are {', '.join(CHOSEN)}")
    if not list((args.other / "python" / "alltoallv").glob("_core*.so")):
        parser.error(f"{args.other} has no built core; `make build` there makes it")
    print("| run | ranks | bytes | this, µs | other, µs | times as fast |\n|---|---:|---:|---:|---:|---:|", flush=True)
    summary = ["| run | calls | median | least | most |", "|---|---:|---:|---:|---:|"]
    for name in names:
        ratios = []
        try:
            for row, ratio in compare(CHOSEN[name], args.other.resolve(), args.turns, args.seconds, args.np):
                print(row, flush=True)
                ratios.append(ratio)
        except subprocess.CalledProcessError as error:
            reason = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
            print(f"# {name}: left out, `{' '.join(error.cmd[1:])}` failed: {reason}", file=sys.stderr, flush=True)
        if ratios:
            figures = (f"{figure:.2f}" for figure in (statistics.median(ratios), min(ratios), max(ratios)))
            summary.append(f"| {name} | {len(ratios)} | {' | '.join(figures)} |")
    print("", *summary, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
