"""The build backend: scikit-build-core's, but an editable installation compiles into the working tree.

pip comes here by ``[build-system]`` of pyproject.toml; setup.py runs the same CMake by `install`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from scikit_build_core import build as _build
    from scikit_build_core.build import (
        build_sdist,
        build_wheel,
        get_requires_for_build_sdist,
        get_requires_for_build_wheel,
        prepare_metadata_for_build_wheel,
    )
except ModuleNotFoundError:  # setup.py needs setuptools alone
    if TYPE_CHECKING:
        raise

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "install",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "python"


def install(prefix: Path, *options: str) -> None:
    """Compiles, and installs what Python loads below ``prefix``, where the packages lie.

    ``CMAKE_ARGS`` are options of CMake; ``SKBUILD_BUILD_DIR`` is where to compile, and is kept.
    """
    if absent := [name for name in ("nanobind", "numpy") if find_spec(name) is None]:
        raise SystemExit(f"alltoallv is compiled with {' and '.join(absent)}: pip install {' '.join(absent)}")
    build = Path(os.environ.get("SKBUILD_BUILD_DIR", ROOT / "build" / (sys.implementation.cache_tag or "python")))
    cmake = _program("cmake")
    configure = [cmake, "-S", str(ROOT), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}"]
    if not (build / "CMakeCache.txt").exists() and shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    subprocess.run([*configure, *shlex.split(os.environ.get("CMAKE_ARGS", ""))], check=True)
    subprocess.run([cmake, "--build", str(build), "--parallel", str(len(os.sched_getaffinity(0)))], check=True)
    command = [cmake, "--install", str(build), "--component", "python", "--prefix", str(prefix), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _program(name: str) -> str:
    """The path of a program, also where it is a package of this Python that is not on PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"alltoallv is compiled by {name}, which is not on PATH: pip install {name}")
    return found


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Compiles into the working tree, which is what an editable installation imports from.

    ``--config-settings=compile=no`` leaves that out; then `make build` does it.
    """
    if (config_settings or {}).get("compile", "yes") != "no":
        install(PYTHON)
    return _build.build_editable(wheel_directory, _for_scikit_build(config_settings), metadata_directory)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    """The metadata, which the options of compiling do not change."""
    return _build.prepare_metadata_for_build_editable(metadata_directory, _for_scikit_build(config_settings))


def _for_scikit_build(config_settings: dict[str, Any] | None) -> dict[str, Any]:
    """The options without the one that is read here."""
    return {name: value for name, value in (config_settings or {}).items() if name != "compile"}


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """What compiles, as for a wheel."""
    return get_requires_for_build_wheel()
