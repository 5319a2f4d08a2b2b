"""Builds the extension module through CMake and Ninja; everything else is in pyproject.toml.

Environment: ``CMAKE_ARGS`` adds arguments to the configure step (``-DALLTOALLV_SANITIZE=thread``), and
``ALLTOALLV_BUILD_DIR`` names another build folder. Builds are incremental.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TAG = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
BUILD = Path(os.environ.get("ALLTOALLV_BUILD_DIR") or ROOT / "build" / TAG).resolve()


class CMakeBuild(build_ext):
    """Configures, builds, and installs the component ``python`` into the package folder."""

    def build_extension(self, ext: Extension) -> None:
        import nanobind
        import ninja
        import numpy

        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(len(os.sched_getaffinity(0)))
        # fmt: off
        self.cmake(
            "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "--log-level=WARNING",
            # Given anew each time: with build isolation they lie in a fresh folder.
            f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR, 'ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DPython_NumPy_INCLUDE_DIR={numpy.get_include()}",
            f"-Dnanobind_DIR={nanobind.cmake_dir()}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        )
        # fmt: on
        self.cmake("--build", str(BUILD), "--parallel", jobs)
        # A sanitizer's report would have no names.
        strip = [] if "SANITIZE" in os.environ.get("CMAKE_ARGS", "") else ["--strip"]
        self.install(Path(self.get_ext_fullpath(ext.name)).parent, *strip)

    def copy_extensions_to_source(self) -> None:
        """Called for editable installs and ``build_ext --inplace``."""
        self.install(Path(self.get_finalized_command("build_py").get_package_dir("alltoallv")))

    def install(self, folder: Path, *options: str) -> None:
        self.cmake("--install", str(BUILD), "--component", "python", "--prefix", str(folder.resolve()), *options)

    @staticmethod
    def cmake(*arguments: str) -> None:
        import cmake

        subprocess.run([str(Path(cmake.CMAKE_BIN_DIR, "cmake")), *arguments], check=True)


setup(
    ext_modules=[Extension("alltoallv._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    # A build folder of one configuration holds all of it, setuptools' copies included.
    options={"build": {"build_base": str(BUILD / "setuptools")}},
)
