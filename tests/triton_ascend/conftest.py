"""Without triton-ascend and its compiler these tests are left out, which the summary says."""

from __future__ import annotations

import importlib.util
import os

import pytest

NEEDS = ("torch", "triton.backends.ascend", "ascendnpuir")

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def _installed(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ascend-table", metavar="FILE", help="write the table of unified-buffer use into FILE")


if not all(map(_installed, NEEDS)):
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            f"tests/triton_ascend left out: one of {', '.join(NEEDS)} is not installed (nox -s triton_ascend)",
            yellow=True,
        )
