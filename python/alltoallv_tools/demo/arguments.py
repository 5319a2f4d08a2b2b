"""Arguments that the command ``demo`` and the program of a rank share; imports little."""

from __future__ import annotations

import argparse

from alltoallv_tools.numbers import count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the shared arguments."""
    parser.add_argument(
        "--output-dir",
        default="demo-output",
        metavar="DIR",
        help="where traffic.png goes (default: %(default)s)",
    )
    parser.add_argument(
        "--repetitions", type=count, default=50, metavar="N", help="timed exchanges (default: %(default)s)"
    )
