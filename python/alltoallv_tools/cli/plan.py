"""``plan``: predicts the time of exchanges and quantized reductions on a cluster."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from alltoallv.errors import InvalidParamError
from alltoallv.npu_ops.limits import Product
from alltoallv_tools.bench.cases import parse_bytes
from alltoallv_tools.bench.figure import panels
from alltoallv_tools.cli.outputs import STANDARD_OUTPUT, check_files, check_plot, write_text
from alltoallv_tools.planner import fit, model, moe, patterns
from alltoallv_tools.planner.topology import PRESETS, Topology
from alltoallv_tools.tables import Table

MAX_RANKS = 100_000

_NP, _TOPOLOGY, _PATTERN, _BYTES = "8,64,512,4096", "atlas-a2", "uniform", "64K..256M"
_PLOTTED = f"2..{MAX_RANKS}"

_EPILOG = """\
Times are in microseconds; docs/plan.md explains the model. NP and BYTES are lists or ranges: 8..64 ranks are
8,16,32,64, and 64K..1M bytes are 64K,256K,1M.

examples:
  python -m alltoallv plan --np 8,64,1024 --topology atlas-a2
  python -m alltoallv plan --np 100000 --topology atlas-a3 --pattern moe --bytes 16M
  python -m alltoallv plan --plot wins.svg
  python -m alltoallv plan --np 16,64 --moe tokens=256,hidden=7168,experts=256,k=8
  python -m alltoallv bench alltoallv --np 2,4 --json measured.json
  python -m alltoallv plan --fit measured.json --out here.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``plan``."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "-n", "-np", "--np", help=f"numbers of ranks, 2 to {MAX_RANKS} (default: {_NP}; with --plot: {_PLOTTED})"
    )
    parser.add_argument(
        "--topology",
        help=f"{', '.join(PRESETS)}, or a JSON file (default: {_TOPOLOGY}; with --plot: all)",
    )
    parser.add_argument(
        "--pattern",
        choices=patterns.NAMES,
        help=f"how all_to_all_v divides the bytes among the ranks (default: {_PATTERN})",
    )
    parser.add_argument("--bytes", help=f"bytes that a rank sends (default: {_BYTES})")
    parser.add_argument(
        "--moe",
        metavar="MODEL",
        help="check a mixture of experts against the limits of Ascend's operators (see examples)",
    )
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit a topology to a file of `bench --json`")
    parser.add_argument("--out", type=Path, metavar="FILE", help="with --fit: write the topology to a file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the predictions to a file")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw from which size quantizing is quicker, into a file .png or .svg"
    )


def main(args: argparse.Namespace) -> int:
    """Prints the predictions, or with --fit the fitted parameters."""
    try:
        _check(args)
        if args.fit:
            return _fit(args.fit, args.out)
        if args.moe is not None:
            return _moe(args)
        topology = Topology.read(_TOPOLOGY if args.topology is None else args.topology)
        pattern = args.pattern or _PATTERN
        sizes = _sizes(_NP if args.np is None else args.np)
        payloads = parse_bytes(_BYTES if args.bytes is None else args.bytes)
        rows = [predict(topology, size, nbytes, pattern) for size in sizes for nbytes in payloads]
        log = sys.stderr if args.json == STANDARD_OUTPUT else sys.stdout
        with contextlib.redirect_stdout(log):
            _print(topology, pattern, rows, sizes)
        if args.json:
            document = {"schema": 1, "topology": asdict(topology), "rows": rows}
            write_text(args.json, json.dumps(document, indent=1))
        if args.plot:
            plot(args.plot, [topology] if args.topology else list(PRESETS.values()), _sizes(args.np or _PLOTTED))
    except BrokenPipeError:
        raise
    except (InvalidParamError, ValueError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuses wrong arguments before anything is computed."""
    for name in ("np", "topology", "pattern", "bytes", "json", "plot"):
        if args.fit and getattr(args, name) is not None:
            raise ValueError(f"--{name} is given with --fit, which takes --out only")
    for name in ("pattern", "bytes", "plot", "fit"):
        if args.moe is not None and getattr(args, name) is not None:
            raise ValueError(f"--{name} is given with --moe, which takes --np, --topology and --json only")
    if args.out and not args.fit:
        raise ValueError("--out is given without --fit, expected both")
    check_files(out=args.out, json=args.json, plot=args.plot)
    check_plot(args.plot)


def _sizes(text: str) -> list[int]:
    sizes: list[int] = []
    for part in text.split(","):
        ends = part.split("..")
        if len(ends) > 2 or not all(end.strip().isdecimal() for end in ends):
            raise ValueError(f"--np is {text!r}, expected numbers such as 8,64 or a range such as 8..64")
        size, last = int(ends[0]), int(ends[-1])
        if size < 2 or last > MAX_RANKS or size > last:
            raise ValueError(f"--np is {text!r}, expected numbers from 2 to {MAX_RANKS}, the smaller one first")
        while size < last:
            sizes.append(size)
            size *= 2
        sizes.append(last)
    return sizes


def predict(topology: Topology, size: int, nbytes: int, pattern: str) -> dict[str, Any]:
    """Predicts one line of the table; times are in microseconds."""
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
        curve = ", by size" if level.curve else ""
        print(f"#   {level.name}, {ranks}: {level.alpha_us:g} µs, {level.port_gbps:g} GB/s per rank{pair}{curve}")
    print(f"# microseconds; all_to_all_v {pattern}: payload of a rank; all_reduce: bytes of the vector in float32")
    first = rows[0]
    names = [*first["all_to_all_v"], *first["all_reduce"]]
    table = Table("np >7", "size(B) >11", *(f"{name} >17.1f" for name in names))
    print(table.head())
    for row in rows:
        print(table.row(row["np"], row["nbytes"], *row["all_to_all_v"].values(), *row["all_reduce"].values()))
    for size in sizes:
        wins = []
        for algorithm in model.REDUCTIONS:
            nbytes = model.quantizing_wins_from(topology, size, algorithm)
            wins.append(f"{algorithm} {'never' if nbytes is None else f'from {nbytes / 1024:.0f} KiB'}")
        print(f"# {size} ranks: int8 is quicker than float16: {', '.join(wins)}")


def _moe(args: argparse.Namespace) -> int:
    """Prints the limits; returns 1 if none of the configurations would run."""
    every: tuple[Product, ...] = ("A2", "A3")
    products = [product for product in every if args.topology in (None, f"atlas-{product.lower()}")]
    if not products:
        raise ValueError(f"--topology is {args.topology!r} with --moe, expected atlas-a2 or atlas-a3")
    rows = moe.rows(moe.parse(args.moe), _sizes(args.np or "8,16,64"), products)
    print(*moe.table(rows), sep="\n", file=sys.stderr if args.json == STANDARD_OUTPUT else sys.stdout)
    if args.json:
        write_text(args.json, json.dumps({"schema": 1, "rows": rows}, indent=1))
    return 0 if any([] in row.values() for row in rows) else 1


def _fit(source: Path, out: Path | None) -> int:
    try:
        fitted = fit.fit(json.loads(source.read_text()))
    except ValueError as error:  # InvalidParamError is a ValueError, and so is what json raises
        raise ValueError(f"--fit is {source}: {error}") from None
    (host,) = fitted.topology.levels
    with contextlib.redirect_stdout(sys.stderr if out == STANDARD_OUTPUT else sys.stdout):
        print("# ranks wait for each other: " + ", ".join(f"{us:.1f} µs where {int(n)}" for n, us in host.waits))
        print("# ranks, bytes that they send together, and GB/s of one with a processor to itself:")
        for ranks, nbytes, rate in host.curve:
            print(f"# {int(ranks):>5} {int(nbytes):>11} {rate:.2f}")
        print(*fitted.table(), sep="\n")
    if out:
        write_text(out, fitted.topology.as_json())
    return 0


def plot(path: Path, topologies: Sequence[Topology] = tuple(PRESETS.values()), sizes: Sequence[int] = ()) -> None:
    """Draws, over the number of ranks, the size from which int8 is faster than float16.

    Args:
        path: PNG or SVG.
        topologies: each is one line, in a panel per algorithm.
        sizes: numbers of ranks; if empty, from 2 to `MAX_RANKS`.
    """
    with panels(path, len(model.REDUCTIONS), (10, 4)) as axes:
        for axis, algorithm in zip(axes, model.REDUCTIONS, strict=True):
            for topology in topologies:
                points = [
                    (size, nbytes)
                    for size in sizes or _sizes(_PLOTTED)
                    if (nbytes := model.quantizing_wins_from(topology, size, algorithm)) is not None
                ]
                # A topology where int8 never wins is in the legend but has no line.
                line = zip(*points, strict=True) if points else ([], [])
                axis.loglog(*line, "o-", markersize=3, label=topology.name)
            axis.set_title(f"{algorithm}: int8 is quicker than float16 above the line", fontsize=10)
            axis.set_xlabel("ranks")
        axes[0].set_ylabel("bytes of the vector in float32")
