"""``bench``: measures the collectives against peers and against what the memory allows."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from alltoallv.bench import environments, report
from alltoallv.bench.cases import APIS, COLLECTIVES, OUTPUTS, PATTERNS, VARIANTS, Case, parse_bytes
from alltoallv.bench.jobs import Job, Jobs, PartyError
from alltoallv.bench.peers import PEERS, SUPPORTED
from alltoallv.bench.turns import columns_of, measure

SUBJECTS = (*COLLECTIVES, "kernels", "overhead")

_EPILOG = """\
Peers run in jobs of their own, each in a Python environment that is made when --peers first names it
(docs/bench.md). Without --peers those take part whose environment exists. Ctrl-C ends all processes.

examples:
  python -m alltoallv bench alltoallv --np 2,4 --bytes 1K..64M --api plan --peers mpich,openmpi,impi
  python -m alltoallv bench overhead
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``bench``."""
    parser.epilog = _EPILOG
    parser.add_argument("collective", nargs="?", default="alltoallv", choices=SUBJECTS)
    parser.add_argument("--np", help="world sizes, such as 2,4,8 (default: 2,4; overhead: 1)")
    parser.add_argument(
        "--bytes", help="payload of a rank: 1K,64K or 1K..64M (default: 1K..64M; overhead: 0; kernels: 64K,1M,16M)"
    )
    parser.add_argument("--dtype", default="float32", help="as NumPy names it (default: %(default)s)")
    parser.add_argument("--pattern", default="uneven", choices=PATTERNS, help="how bytes divide (default: %(default)s)")
    parser.add_argument("--api", default="numpy", choices=APIS, help="our interface (default: %(default)s)")
    parser.add_argument("--output", default="allocated", choices=OUTPUTS, help="(default: %(default)s)")
    parser.add_argument(
        "--variant",
        default="plain",
        choices=VARIANTS,
        help="between calls: nothing, the send buffer is rewritten, the output is read, both (default: %(default)s)",
    )
    parser.add_argument("--peers", help=f"comma-separated, of {', '.join(PEERS)} (default: those at hand)")
    parser.add_argument("--seconds", type=float, default=2.0, help="per line of the table (default: %(default)s)")
    parser.add_argument("--no-bind", action="store_true", help="do not bind ranks to processors where there are enough")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, schema in docs/bench.md")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there, as PNG or SVG by its suffix")


def main(args: argparse.Namespace) -> int:
    """Runs the benchmark; exits with 1 if any result was wrong or nothing of ours could be measured."""
    try:
        if args.collective == "kernels":
            from alltoallv.bench import kernels

            return kernels.main(args)
        if args.collective == "overhead":
            args.api = "core"  # the others are columns
        sizes, cases = _sizes(args), _cases(args)
        peers = _peers(args)
        if args.plot and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install matplotlib")
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    try:
        rows = _run(args, sizes, cases, peers)
    except KeyboardInterrupt:
        print("bench: interrupted; all processes have been ended", file=sys.stderr)
        return 130
    names = _columns(cases[0], ["ours", *peers])
    if args.json:
        about = {"api": args.api, "bound": not args.no_bind, "collective": args.collective}
        report.write_json(args.json, about, rows)
    if args.plot:
        report.plot(rows, names, args.plot)
    complete = len(rows) == len(sizes) * len(cases)
    return int(not complete or any(report.wrong(row) for row in rows))


def _sizes(args: argparse.Namespace) -> list[int]:
    text = args.np or ("1" if args.collective == "overhead" else "2,4")
    sizes = [int(n) for n in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"--np is {text!r}, expected numbers of at least 1")
    return sizes


def _cases(args: argparse.Namespace) -> list[Case]:
    text = args.bytes or ("0" if args.collective == "overhead" else "1K..64M")
    if args.collective == "quantized" and args.dtype != "float32":
        raise ValueError(f"--dtype is {args.dtype!r}, expected float32 for quantized")
    return [Case(args.collective, n, args.dtype, args.pattern, args.output, args.variant) for n in parse_bytes(text)]


def _peers(args: argparse.Namespace) -> list[str]:
    able = [name for name in PEERS if args.collective in SUPPORTED[name] or args.collective == "overhead"]
    if args.peers is None:
        if args.collective == "overhead":
            return []
        return [name for name in able if environments.is_ready("torch" if name == "gloo" else name)]
    peers = [name for name in args.peers.split(",") if name]
    if unknown := sorted(set(peers) - set(PEERS)):
        raise ValueError(f"--peers has {', '.join(unknown)}, expected {', '.join(PEERS)}")
    if unable := sorted(set(peers) - set(able)):
        raise ValueError(f"--peers has {', '.join(unable)}, which has no {args.collective}")
    return peers


def _columns(case: Case, parties: list[str]) -> list[str]:
    columns = columns_of(parties, case)
    return [name for party in [*parties[1:], "ours"] for name in columns[party] if name != "ours"]


def _run(args: argparse.Namespace, sizes: list[int], cases: list[Case], peers: list[str]) -> list[report.Row]:
    rows: list[report.Row] = []
    names = _columns(cases[0], ["ours", *peers])
    computer = report.machine()
    about = f"{args.collective} {args.dtype} {args.pattern} {args.variant}, api {args.api}, output {args.output}; "
    about += f"{computer['cpus']} cpus {computer['model']}, load {computer['load']}"
    print(report.header(about, names))
    bar = report.Progress(len(sizes) * len(cases))

    def say(text: str) -> None:
        bar.clear()
        print(f"# {text}", file=sys.stderr, flush=True)

    with Jobs(args.api, bind=not args.no_bind, say=say) as jobs:
        for size in sizes:
            bar.step(f"starting {size} ranks of each", done=False)
            running = _start(jobs, ["ours", *peers], size, say)
            if "ours" not in running:
                break
            for case in cases:
                bar.step(f"{size} ranks, {case.nbytes} bytes", done=False)
                before = dict(running)
                row = measure(running, case, args.seconds, columns_of(list(running), case))
                for party, reason in row["failed"].items():
                    say(reason)
                    jobs.stop(before[party])
                if "ours" not in running:
                    break
                rows.append(row)
                bar.clear()
                print(report.line(row, names), flush=True)
                bar.step(f"{size} ranks, {case.nbytes} bytes")
            for job in running.values():
                jobs.stop(job)
    bar.clear()
    return rows


def _start(jobs: Jobs, parties: list[str], size: int, say: Any) -> dict[str, Job]:
    """The parties that come up; the others are reported and left out."""
    running: dict[str, Job] = {}
    for party in parties:
        try:
            running[party] = jobs.start(party, size)
        except PartyError as error:
            say(f"left out: {error}")
    return running
