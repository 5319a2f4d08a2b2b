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


def check_files(**paths: Path | None) -> None:
    """Checks that the files that options name can be written; ``-`` is standard output.

    Raises:
        ValueError: a folder is missing or not writable, a path is a folder or a file that is not writable, or two
            options name the same file.
    """
    named = {option: path for option, path in paths.items() if path is not None}
    for option, path in named.items():
        writable = os.access(path if path.exists() else path.parent, os.W_OK) and not path.is_dir()
        if path != STANDARD_OUTPUT and not writable:
            raise ValueError(f"--{option} is {str(path)!r}, expected a file in a folder that exists and can be written")
        for other in named:
            if other != option and named[other] == path:
                raise ValueError(f"--{option} and --{other} are both {str(path)!r}, expected two files")


def check_plot(path: Path | None) -> None:
    """Checks the file given to --plot.

    Raises:
        ValueError: its suffix names no format that we know, or matplotlib is missing.
    """
    if path and path.suffix not in _PLOTS:
        raise ValueError(f"--plot is {str(path)!r}, expected a name that ends with {' or '.join(_PLOTS)}")
    if path and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
