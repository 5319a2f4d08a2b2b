"""The Triton kernels run on a GPU if there is one, else interpreted; without triton these tests are left out."""

from __future__ import annotations

import importlib.util
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def _installed(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None  # without them the names find folders of tests


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if not (_installed("torch") and _installed("triton")):
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            "tests/triton_kernels left out: torch or triton is not installed (pip install torch triton)", yellow=True
        )
elif not _has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
