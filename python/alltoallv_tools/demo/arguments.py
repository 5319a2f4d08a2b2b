"""Arguments that the command ``demo`` and the program of a rank have in common; needs nothing else."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what both have in common."""
    parser.add_argument(
        "--output-dir",
        default="demo-output",
        metavar="DIR",
        help="where traffic.png goes (default: %(default)s)",
    )
    parser.add_argument(
        "--repetitions", type=positive, default=50, metavar="N", help="timed exchanges (default: %(default)s)"
    )


def positive(text: str) -> int:
    """An argument that is an integer of at least 1."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"is {text!r}, expected an integer of at least 1")
    return int(text)
