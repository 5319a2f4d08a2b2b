"""Where nbclient is missing this test is left out, which the summary says."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("nbclient") is None:
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line("tests/notebook left out: nbclient is not installed (nox -s docs)", yellow=True)
