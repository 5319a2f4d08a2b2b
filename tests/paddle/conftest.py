"""Where Paddle is missing these tests are left out, which the summary says."""

from __future__ import annotations

import importlib.util
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks are as many as the cores, or more

# This folder itself is found as a namespace of that name, which has no origin.
_spec = importlib.util.find_spec("paddle")

if _spec is None or _spec.origin is None:
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        text = "tests/paddle left out: paddle is not installed (pip install 'paddlepaddle==3.3.*')"
        terminalreporter.write_line(text, yellow=True)
