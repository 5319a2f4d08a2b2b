"""Where torch is missing these tests are left out, which the summary says."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from backend_groups import Grouped

    from alltoallv.testing import Ranks

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks are as many as the cores, or more


def _installed(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None  # without torch the name finds this folder


if not _installed("torch"):
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line("tests/torch left out: torch is not installed (pip install torch)", yellow=True)


@pytest.fixture(scope="session")
def ranks_preload() -> tuple[str, ...]:
    # The last two are what the first torch.compile of a process imports: five seconds of every rank.
    return "alltoallv.torch", "torch._dynamo", "torch._inductor.lowering"


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Where the ranks of one group meet."""
    return str(tmp_path / "store")


@pytest.fixture
def grouped(ranks: Ranks, tmp_path: Path) -> Grouped:
    """``grouped(2)(function)`` calls ``function(rank, size, group)`` on 2 ranks of a default group; see `Grouped`."""
    from backend_groups import Grouped

    return Grouped(ranks, tmp_path)
