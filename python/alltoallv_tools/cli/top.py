"""``top``: shows what the ranks of a running job do, from the trace that they write."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from alltoallv_tools import numbers
from alltoallv_tools.trace.records import read
from alltoallv_tools.trace.watch import table

_EPILOG = """\
Start the job with ALLTOALLV_TRACE=FOLDER. Ctrl-C ends the display, not the job.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``top``."""
    parser.epilog = _EPILOG
    parser.add_argument("folder", type=Path, help="the folder of ALLTOALLV_TRACE")
    parser.add_argument(
        "--seconds", type=numbers.seconds, default=1.0, help="time between two updates (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="show one table and end")


def main(args: argparse.Namespace) -> int:
    """Shows the table until Ctrl-C."""
    clear = "\x1b[H\x1b[J" if sys.stdout.isatty() and not args.once else ""
    while True:
        try:
            lines = table(read(args.folder), args.seconds)
        except (OSError, ValueError) as error:
            print(f"top: {error}", file=sys.stderr)
            return 2
        print(clear + "\n".join(lines), flush=True)
        if args.once:
            return 0
        time.sleep(args.seconds)
