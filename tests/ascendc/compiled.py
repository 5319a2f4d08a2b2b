"""Compiles kernels with their twin while tests run, so that they can be changed first."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "op_kernel" / "ascendc"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
FLAGS = ["-std=c++20", "-w", "-ffp-contract=off", "-fPIC", "-pthread"]


def run_compiler(source: Path, *flags: str, folders: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    """Compiles a source; headers are looked for in ``folders`` first."""
    assert COMPILER, "these tests need a C++ compiler: CXX, g++ or c++"
    found = [f"-I{folder}" for folder in (*folders, ROOT, KERNELS, KERNELS / "twin")]
    command = [COMPILER, *FLAGS, *found, *flags, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def as_one(target: Path, *sources: Path) -> Path:
    """A source at ``target`` that includes all others: most of the time of each goes into the same headers."""
    target.write_text("".join(f'#include "{source}"\n' for source in sources))
    return target


def library(source: Path, target: Path, folders: Sequence[Path] = ()) -> Path:
    """A shared library of one source."""
    done = run_compiler(source, "-O1", "-shared", "-o", str(target), folders=folders)
    assert done.returncode == 0, done.stderr
    return target
