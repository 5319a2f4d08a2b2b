"""Emulated NPUs for the ranks; where torch_npu or the emulator is missing these tests are left out, and say so."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

import alltoallv_emulator as emulator


def missing() -> str:
    """What the tests need and this environment has not."""
    for module in ("torch", "torch_npu"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed (pip install torch==2.13.* torch_npu==2.13.0)"
    try:
        emulator.library_folder()
    except FileNotFoundError as error:
        return str(error)
    return ""


reason = missing()
if reason:
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"tests/npu left out: {reason}", yellow=True)

else:
    # The ranks inherit this. Here it comes too late for the loader: this process uses no device.
    # Sums have the CPU's bits, which many tests compare; tests of a device's order set it themselves.
    os.environ.update(emulator.environment(order="rank"))
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    os.environ["TASK_QUEUE_ENABLE"] = "1"  # as on a device: the tests look for what goes wrong with it
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ranks_preload() -> tuple[str, ...]:
    return ("torch_npu", "alltoallv.torch", "alltoallv_emulator.aten")


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Where the ranks of one group meet."""
    return str(tmp_path / "store")
