"""Where jax is missing these tests are left out, which the summary says."""

from __future__ import annotations

import importlib.util

import pytest

if (spec := importlib.util.find_spec("jax")) is None or spec.origin is None:  # the name finds this folder
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line("tests/jax left out: jax is not installed (pip install jax)", yellow=True)
