"""Types of arguments that are numbers, for argparse."""

from __future__ import annotations

import argparse


def count(text: str, least: int = 1) -> int:
    """Parses an integer of at least ``least``."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) >= least):
        raise argparse.ArgumentTypeError(f"is {text!r}, expected an integer of at least {least}")
    return int(text)


def count_or_0(text: str) -> int:
    """Parses an integer of at least 0."""
    return count(text, 0)


def seconds(text: str, or_0: bool = False) -> float:
    """Parses a number of seconds above 0, which may be years."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 < value < 1e9 or (or_0 and value == 0)):
        least = "of at least 0" if or_0 else "above 0"
        raise argparse.ArgumentTypeError(f"is {text!r}, expected a number of seconds {least}, below 1e9")
    return value
