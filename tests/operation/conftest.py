"""Runs a function on real ranks, once as threads and once as processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from alltoallv.testing import Ranks

Launch = Callable[..., list[Any]]


@pytest.fixture(params=["threads", "processes"])
def launch(request: pytest.FixtureRequest, ranks: Ranks) -> Launch:
    """``launch(size, function, *arguments)`` calls ``function(communicator, *arguments)`` on every rank.

    Returns the results in rank order.
    """
    threads = request.param == "threads"
    return lambda size, function, *arguments: ranks(size, threads=threads)(function, *arguments)
