"""The columns whose framework is installed; the summary names the others."""

from __future__ import annotations

import os

import pytest
from columns import COLUMNS, RUNS

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks are as many as the cores, or more


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = ", ".join(column.name for column in COLUMNS if column not in RUNS)
    terminalreporter.write_line(f"tests/matrix: columns left out here, which other sessions run: {left_out}")


@pytest.fixture(scope="session")
def ranks_preload() -> tuple[str, ...]:
    return tuple({"alltoallv.torch" for column in RUNS if column.package == "torch"})
