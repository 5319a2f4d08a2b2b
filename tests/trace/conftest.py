"""A trace of real ranks for the tests of what reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from traced_program import traffic


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, ranks) -> Path:
    """The trace of `traffic` on 4 processes."""
    path = tmp_path_factory.mktemp("trace") / "made"
    ranks(4)(traffic, str(path))
    return path
