"""Where MindSpore or mindformers is missing these tests are left out, which the summary says."""

from __future__ import annotations

import importlib.util

import pytest

_specs = [importlib.util.find_spec(name) for name in ("mindspore", "mindformers", "regex")]

# These folders themselves are found as namespaces of those names, which have no origin.
if any(spec is None or spec.origin is None for spec in _specs):
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        text = "tests/mindformers left out: mindspore, mindformers or regex is not installed (nox -s mindformers)"
        terminalreporter.write_line(text, yellow=True)
