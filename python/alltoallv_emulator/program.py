"""Starts a Python program on the emulator: ``python -m alltoallv_emulator.program script.py [argument ...]``.

``-m module`` in place of the script runs a module. The program runs as ``python`` itself would run it, with one
addition: as soon as torch_npu has been imported (which ``import torch`` does by itself where the wheel is installed),
:func:`alltoallv_emulator.aten.install` is called. For that an entry is put in front of ``sys.meta_path``; nothing is
installed, and no file of torch or torch_npu is touched. The environment must be the one of
:func:`alltoallv_emulator.environment`: the loader reads LD_LIBRARY_PATH only when a process starts.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from alltoallv_emulator import library_folder


class _AfterTorchNpu(MetaPathFinder):
    """Finds torch_npu as usual, and installs the operators once it has been executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch_npu":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _InstallingLoader(spec.loader)
        return spec


class _InstallingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from alltoallv_emulator import aten

        aten.install()


def main(arguments: Sequence[str]) -> None:
    """Runs the program; ``arguments`` are a script or ``-m`` and a module, and what it gets."""
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        raise SystemExit("usage: python -m alltoallv_emulator.program (script.py | -m module) [argument ...]")
    folder = str(library_folder())
    if folder not in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        raise SystemExit(f"LD_LIBRARY_PATH lacks {folder}: start the process with alltoallv_emulator.environment()")
    sys.meta_path.insert(0, _AfterTorchNpu())
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
