"""``plan``: predicts the time of exchanges and quantized reductions on a cluster."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from alltoallv.bench.cases import parse_bytes
from alltoallv.errors import InvalidParamError
from alltoallv.planner import fit, model, patterns
from alltoallv.planner.topology import PRESETS, Topology

MAX_RANKS = 100_000

_EPILOG = """\
Times are microseconds, from the model of docs/plan.md. NP and sizes may be lists and ranges.

examples:
  python -m alltoallv plan --np 8,64,1024 --topology atlas-a2
  python -m alltoallv plan --np 100000 --topology atlas-a3 --pattern moe --bytes 16M
  python -m alltoallv bench alltoallv --np 2,4 --json measured.json
  python -m alltoallv plan --fit measured.json --out here.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``plan``."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--np", default="8,64,512,4096", help=f"numbers of ranks, 2 to {MAX_RANKS} (default: %(default)s)"
    )
    parser.add_argument(
        "--topology", default="atlas-a2", help=f"{', '.join(PRESETS)}, or a JSON file (default: %(default)s)"
    )
    parser.add_argument("--pattern", default="uniform", choices=patterns.NAMES, help="(default: %(default)s)")
    parser.add_argument("--bytes", default="64K..256M", help="payload of a rank (default: %(default)s)")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit a topology to what `bench --json` wrote")
    parser.add_argument("--out", type=Path, metavar="FILE", help="with --fit: write the topology there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the predictions there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw where quantizing starts to win, PNG or SVG")


def main(args: argparse.Namespace) -> int:
    """Prints the predictions."""
    try:
        if args.fit:
            return _fit(args.fit, args.out)
        topology = Topology.read(args.topology)
        sizes = _sizes(args.np)
        rows = [predict(topology, size, nbytes, args.pattern) for size in sizes for nbytes in parse_bytes(args.bytes)]
    except (InvalidParamError, ValueError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    _print(topology, args.pattern, rows, sizes)
    if args.json:
        args.json.write_text(json.dumps({"schema": 1, "topology": topology.name, "rows": rows}, indent=1) + "\n")
    if args.plot:
        plot(args.plot)
    return 0


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if min(sizes) < 2 or max(sizes) > MAX_RANKS:
        raise ValueError(f"--np is {text!r}, expected numbers from 2 to {MAX_RANKS}")
    return sizes


def predict(topology: Topology, size: int, nbytes: int, pattern: str) -> dict[str, Any]:
    """One line of the table; times in microseconds."""
    exchanges = {a: model.all_to_all_v(topology, size, nbytes, pattern, a) for a in model.EXCHANGES}
    reductions = {
        f"{name} {algorithm}": model.all_reduce(topology, size, nbytes, algorithm, bits=bits)
        for name, bits in (("float16", 16), ("int8", 8))
        for algorithm in model.REDUCTIONS
    }
    return {"np": size, "nbytes": nbytes, "pattern": pattern, "all_to_all_v": exchanges, "all_reduce": reductions}


def _print(topology: Topology, pattern: str, rows: list[dict[str, Any]], sizes: list[int]) -> None:
    print(f"# {topology.name}: {topology.source}")
    for level in topology.levels:
        ranks = f"groups of {level.ranks}" if level.ranks else "all"
        pair = f", {level.pair_gbps:g} per pair" if level.pair_gbps else ""
        print(f"#   {level.name}, {ranks}: {level.alpha_us:g} us, {level.port_gbps:g} GB/s per rank{pair}")
    print(f"# microseconds; all_to_all_v {pattern}: payload of a rank; all_reduce: bytes of the vector in float32")
    first = rows[0]
    names = [*first["all_to_all_v"], *first["all_reduce"]]
    print(f"{'np':>7} {'size(B)':>11}" + "".join(f" {name:>17}" for name in names))
    for row in rows:
        times = [*row["all_to_all_v"].values(), *row["all_reduce"].values()]
        print(f"{row['np']:>7} {row['nbytes']:>11}" + "".join(f" {time:>17.1f}" for time in times))
    for size in sizes:
        wins = []
        for algorithm in model.REDUCTIONS:
            nbytes = model.quantizing_wins_from(topology, size, algorithm)
            wins.append(f"{algorithm} {'never' if nbytes is None else f'from {nbytes / 1024:.0f} KiB'}")
        print(f"# {size} ranks: int8 is quicker than float16: {', '.join(wins)}")


def _fit(source: Path, out: Path | None) -> int:
    document = json.loads(source.read_text())
    known, held = fit.split(document["rows"])
    topology = fit.shared_memory(known, document["machine"]["cpus"])
    print(f"# start {topology.start_us:.2f} us, per peer {topology.message_us:.2f} us, GB/s by payload:")
    for nbytes, rate in topology.levels[0].curve:
        print(f"#   {int(nbytes):>10} {rate:.2f}")
    print(f"{'np':>3} {'size(B)':>10} {'measured':>12} {'predicted':>12} {'error':>7}")
    checks = fit.check(topology, held)
    for each in checks:
        print(f"{each.size:>3} {each.nbytes:>10} {each.measured:>12.1f} {each.predicted:>12.1f} {each.error:>6.0%}")
    if checks:
        within = sum(abs(each.error) <= 0.25 for each in checks)
        print(f"# {within} of {len(checks)} sizes that were not used for the fit are predicted within 25 %")
    if out:
        topology.write(out)
    return 0


def plot(path: Path) -> None:
    """By number of ranks: the size from which int8 beats float16, for every preset and algorithm."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "alltoallv"
    import matplotlib.pyplot as plt

    sizes = [2**k for k in range(1, 17)] + [MAX_RANKS]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, algorithm in zip(axes, model.REDUCTIONS, strict=True):
        for name, topology in PRESETS.items():
            points = [(size, model.quantizing_wins_from(topology, size, algorithm)) for size in sizes]
            shown = [(size, nbytes) for size, nbytes in points if nbytes is not None]
            if shown:
                axis.loglog(*zip(*shown, strict=True), "o-", markersize=3, label=name)
        axis.set_title(f"{algorithm}: int8 is quicker than float16 above the line", fontsize=10)
        axis.set_xlabel("ranks")
        axis.grid(True, which="both", alpha=0.3)
    axes[0].set_ylabel("bytes of the vector in float32")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
