"""Arguments that the command ``demo`` and the program of a rank share; imports nothing else."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the shared arguments."""
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
    """Parses an integer of at least 1."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"is {text!r}, expected an integer of at least 1")
    return int(text)
