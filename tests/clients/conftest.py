"""Without torch these tests are left out, which the summary says."""

from __future__ import annotations

import pytest
from client_programs import found

if "torch" not in found():
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        text = "tests/clients left out: torch is not installed (nox -s clients installs it, and the clients)"
        terminalreporter.write_line(text, yellow=True)
