"""Starts a Python program on the emulator: ``python -m alltoallv_emulator.program script.py [argument ...]``.

``-m module`` in place of the script runs a module. The program runs as ``python`` itself would run it, with one
addition: as soon as torch_npu has been imported (which ``import torch`` does by itself where the wheel is installed),
:func:`alltoallv_emulator.aten.install` is called. No file of torch or torch_npu is touched. The environment must be the
one of :func:`alltoallv_emulator.environment`: the loader reads LD_LIBRARY_PATH only when a process starts. Processes
that the program starts inherit it, and have the operators as well.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from alltoallv_emulator import after_torch_npu, library_folder


def main(arguments: Sequence[str]) -> None:
    """Runs the program; ``arguments`` are a script, or ``-m`` and a module, and then the program's own arguments."""
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        raise SystemExit("usage: python -m alltoallv_emulator.program (script.py | -m module) [argument ...]")
    folder = str(library_folder())
    if folder not in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        raise SystemExit(f"LD_LIBRARY_PATH lacks {folder}: start the process with alltoallv_emulator.environment()")
    after_torch_npu.watch()
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
