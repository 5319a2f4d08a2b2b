"""Ranks are forked from a process that has imported what every episode needs."""

from __future__ import annotations

import os

import pytest
import rooms  # noqa: F401 - the modules below
from columns import RUNS

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks are as many as the cores, or more
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ranks_preload() -> tuple[str, ...]:
    return ("episode", *{f"alltoallv.{column.package}" for column in RUNS if column.package in ("numpy", "torch")})
