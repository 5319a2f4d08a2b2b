"""Ranks for the tests of the NumPy front end: processes or threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from alltoallv.testing import Ranks


@pytest.fixture(params=["processes", "threads"])
def launch(request: pytest.FixtureRequest, ranks: Ranks) -> Callable[..., list[Any]]:
    """``launch(size, function, *arguments)`` runs ``function(communicator, *arguments)`` on every rank."""
    threads = request.param == "threads"
    return lambda size, function, *arguments: ranks(size, threads=threads)(function, *arguments)
