"""Ranks for the tests of quantized collectives: processes or threads."""

from __future__ import annotations

from typing import Any

import pytest
from quantized_cases import Launch

from alltoallv.testing import Ranks


@pytest.fixture(params=["processes", "threads"])
def launch(request: pytest.FixtureRequest, ranks: Ranks) -> Launch:
    """``launch(size, function, *arguments)`` runs ``function(communicator, *arguments)`` on every rank."""
    threads = request.param == "threads"

    def run(size: int, function: Any, *arguments: Any, **options: Any) -> list[Any]:
        return ranks(size, threads=threads, **options)(function, *arguments)

    return run
