"""Every Python in the emulator's environment imports this, so a program's children have the emulator's operators."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def _import_the_other() -> None:
    """Runs the sitecustomize that this one hides, if there is one."""
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if Path(p).resolve() != _FOLDER])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if find_spec("alltoallv_emulator") is None:
    sys.path.append(str(_FOLDER.parents[1]))
from alltoallv_emulator import after_torch_npu  # noqa: E402 - it must be found first

after_torch_npu.watch()
_import_the_other()
