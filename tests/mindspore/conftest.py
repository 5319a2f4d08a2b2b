"""One job for all checks; nothing is collected where MindSpore is not installed."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
from msrun_jobs import HERE, msrun

# This folder itself is found as a namespace of that name, which has no origin.
_spec = importlib.util.find_spec("mindspore")
HAS_MINDSPORE = _spec is not None and _spec.origin is not None

collect_ignore_glob = [] if HAS_MINDSPORE else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not HAS_MINDSPORE:
        reason = "mindspore is not installed (pip install 'mindspore==2.10.*' 'numpy<2')"
        terminalreporter.write_line(f"SKIPPED tests/mindspore: {reason}")


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every check of ``checks_*.py`` came to: error text or "" by rank, from one job of 2 workers."""
    folder = tmp_path_factory.mktemp("checks")
    job = msrun(folder, 2, HERE / "run_checks.py", str(folder), timeout=300)
    found: dict[str, dict[int, str]] = {}
    for rank in range(2):
        path = folder / f"rank-{rank}.json"
        assert path.exists(), f"rank {rank} did not finish:\n" + "\n".join(job.logs.values())[-6000:]
        for name, text in json.loads(path.read_text()).items():
            found.setdefault(name, {})[rank] = text
    assert job.code == 0, job.output[-3000:]
    return found
