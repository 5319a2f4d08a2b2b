"""Times from causes to errors: checked in every test that names one, the slowest of each kind shown at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from trouble import LIMIT

_slowest: dict[str, float] = {}


@pytest.fixture
def prompt() -> Callable[[str, float, float], None]:
    """``prompt(what, cause, error)``: the error came soon after its cause (both in seconds)."""

    def check(what: str, cause: float, error: float) -> None:
        delay = error - cause  # a little below 0 where another rank's clock of a timeout started first
        # Causes are timed in another process, and what begins with a pause may begin before the cause is noted.
        assert -0.05 <= delay < LIMIT, f"{what}: {delay:.3f} s from cause to error"
        _slowest[what] = max(_slowest.get(what, 0.0), delay)

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _slowest:
        return
    terminalreporter.section("slowest from cause to error")
    for what, delay in sorted(_slowest.items()):
        terminalreporter.write_line(f"{1000 * delay:8.1f} ms  {what}")
