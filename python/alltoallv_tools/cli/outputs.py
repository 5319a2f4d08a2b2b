"""Checks a command's output files before it computes anything, so that no result is lost, and writes them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TextIO

_PLOTS = (".png", ".svg")


STANDARD_OUTPUT = Path("-")


def write_text(path: Path, text: str, log: TextIO | None = None) -> None:
    """Writes a file and reports it on ``log``; ``-`` is standard output."""
    if path == STANDARD_OUTPUT:
        print(text)
        return
    path.write_text(text + "\n", "utf-8")
    if log is not None:
        print(f"wrote {path}", file=log)


def check_file(option: str, path: Path | None) -> None:
    """Checks that a file can be written; ``-`` is standard output.

    Raises:
        ValueError: its folder is missing or not writable, or the path is a folder or a file that is not writable.
    """
    if path is None or path == STANDARD_OUTPUT:
        return
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--{option} is {str(path)!r}, expected a file in a folder that exists and can be written")


def check_plot(path: Path | None) -> None:
    """Checks the file given to --plot.

    Raises:
        ValueError: the file cannot be written, its suffix names no format that we know, or matplotlib is missing.
    """
    check_file("plot", path)
    if path and path.suffix not in _PLOTS:
        raise ValueError(f"--plot is {str(path)!r}, expected a name that ends with {' or '.join(_PLOTS)}")
    if path and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
