"""Emulates Ascend NPUs on machines without any: ACL and HCCL over host memory, under the names of CANN's libraries.

Programs that load ``libascendcl.so`` and ``libhccl.so`` (torch_npu's wheel from PyPI, our own transport ``hccl``) run
on it when the loader finds these libraries first::

    subprocess.run([sys.executable, "train.py"], env=alltoallv_emulator.environment())

``python -m alltoallv run --emulate-npu -n 4 train.py`` does that for every rank. docs/emulator.md lists what works
and what is refused.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["DEFAULT_DEVICES", "LIBRARY_NAMES", "PACKAGES", "environment", "library_folder", "set_option"]

DEFAULT_DEVICES = 8
PACKAGES = ("cann_ops_transformer",)
LIBRARY_NAMES = (
    "libascendcl.so",
    "libhccl.so",
    "libhcomm.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libatb.so",
    "libnnopbase.so",
    "libcust_opapi.so",
)


def library_folder() -> Path:
    """Returns the folder of the emulated libraries.

    Raises:
        FileNotFoundError: They were not built with the package.
    """
    folder = Path(__file__).resolve().parent / "lib"
    for name in LIBRARY_NAMES:
        if not (folder / name).is_file():
            cure = "in a checkout, `make build` makes it"
            raise FileNotFoundError(f"{folder / name} is missing: the package was built without the emulator; {cure}")
    return folder


def environment(
    base: Mapping[str, str] | None = None,
    *,
    devices: int | None = None,
    memory_mb: int | None = None,
    task_delay_us: int | None = None,
    connect_timeout: float | None = None,
    exec_timeout: float | None = None,
    order: str | None = None,
    cann_version: str | None = None,
    faults: str | None = None,
    packages: Sequence[str] = (),
) -> dict[str, str]:
    """Returns the environment for a child process that uses the emulated devices; its own children inherit it.

    Args:
        base: Variables to start from; default: this process's.
        devices: Number of devices (:data:`DEFAULT_DEVICES`).
        memory_mb: Memory of each device, in MB (8192).
        task_delay_us: Microseconds by which every task of a stream is delayed, to reveal missing synchronization.
        connect_timeout: Seconds for the ranks of a communicator to arrive; by default HCCL_CONNECT_TIMEOUT decides.
        exec_timeout: Seconds for a collective; by default HCCL_EXEC_TIMEOUT decides.
        order: Of the terms of a sum: ``rank``, ``ring``, ``halving``, or ``length``, which chooses among these by the
            length, as a device does (``length``).
        cann_version: The CANN version that programs see, MAJOR.MINOR.RELEASE (8.5.0): torch_npu asks for it.
        faults: Faults to inject, ``FUNCTION[@RANK][#CALL]=ACTION`` separated by ``;``: see docs/emulator.md.
        packages: CANN's Python packages, of :data:`PACKAGES`, that programs find where the real ones are not.
    """
    env = {"PATH": os.defpath} | dict(os.environ if base is None else base)
    folder = library_folder()
    paths = {"LD_LIBRARY_PATH": folder, "PYTHONPATH": folder.parent / "startup", "ASCEND_CUSTOM_OPP_PATH": folder}
    paths["PATH"] = folder.parent / "bin"  # npu-smi, which runs in this Python
    env["ALLTOALLV_EMULATOR_PYTHON"] = sys.executable
    for name, first in paths.items():
        others = [path for path in env.get(name, "").split(os.pathsep) if path and path != str(first)]
        env[name] = os.pathsep.join([str(first), *others])
    settings = {
        "devices": devices,
        "memory_mb": memory_mb,
        "task_delay_us": task_delay_us,
        "connect_timeout": connect_timeout,
        "exec_timeout": exec_timeout,
        "order": order,
        "cann_version": cann_version,
        "faults": faults,
        "with": " ".join(packages) or None,
    }
    env.setdefault("TASK_QUEUE_ENABLE", "0")  # launch in the caller: another thread would hide no latency here
    env.update({f"ALLTOALLV_EMULATOR_{name.upper()}": str(v) for name, v in settings.items() if v is not None})
    return env


def set_option(name: str, value: str | int | float) -> None:
    """Changes a setting in this process, which must have been started with :func:`environment`.

    Args:
        name: ``devices``, ``memory_mb``, ``task_delay_us``, ``connect_timeout``, ``exec_timeout``,
            ``order``, ``late_counts``, ``capturing``, ``verbose``, ``cann_version`` or ``faults`` (adds rules; an
            empty text removes all).
        value: The new value.

    Raises:
        ValueError: The emulator refuses name or value; its message is on standard error.
    """
    if _library().AlltoallvEmulatorSet(name.encode(), str(value).encode()) != 0:
        raise ValueError(f"the emulator does not accept {name}={value!r}")


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(library_folder() / "libascendcl.so"))
