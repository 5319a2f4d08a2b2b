"""``trace``: shows what a job has moved, from the files that ALLTOALLV_TRACE or alltoallv.trace() wrote."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from alltoallv_tools.cli.outputs import check_files, write_text
from alltoallv_tools.trace import flight, page, perfetto, summary, torch_flight
from alltoallv_tools.trace.records import read

_EPILOG = """\
The command says in words which operator each rank is in, or was in when the job ended. Without options it also
writes the page FOLDER/trace.html. The job may still be running. With FILE "-" the output goes to standard output.

example:
  ALLTOALLV_TRACE=traffic python -m alltoallv run -n 4 program.py
  python -m alltoallv trace traffic
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``trace``."""
    parser.epilog = _EPILOG
    parser.add_argument("folder", type=Path, help="the folder of ALLTOALLV_TRACE or of ALLTOALLV_FLIGHT_DIR")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the page to a file (default: FOLDER/trace.html)"
    )
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="write JSON for ui.perfetto.dev to a file")
    parser.add_argument(
        "--flight-recorder",
        type=Path,
        metavar="DIR",
        help="write dumps for torchfrtrace into a folder",
    )


def main(args: argparse.Namespace) -> int:
    """Writes the requested outputs; returns 2 if it cannot."""
    target = args.html or (None if args.perfetto or args.flight_recorder else args.folder / "trace.html")
    try:
        domains = flight.read(args.folder) or read(args.folder)
        check_files(html=target, perfetto=args.perfetto)
    except (OSError, ValueError) as error:
        print(f"trace: {error}", file=sys.stderr)
        return 2
    log = sys.stderr if Path("-") in (args.html, args.perfetto) else sys.stdout
    for sentence in summary.tell(domains):
        print(sentence, file=log)
    if target:
        write_text(target, page.html(domains, str(args.folder)), log)
    if args.perfetto:
        write_text(args.perfetto, json.dumps(perfetto.events(domains)), log)
    if args.flight_recorder:
        paths = torch_flight.write(domains, args.flight_recorder)
        print(f"wrote {len(paths)} dumps; compare them with: torchfrtrace {args.flight_recorder}", file=log)
    return 0
