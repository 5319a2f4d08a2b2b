"""The pytest plugin: registers the fixture ``ranks``, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from alltoallv.testing.pool import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Runs a function on n ranks: ``ranks(4)(function, *args)`` calls ``function(communicator, *args)`` on
    each.

    Returns the list of results; raises RankFailures with the traceback of every rank that failed. The
    processes are kept for the next call. See :class:`alltoallv.testing.Ranks` for the options.
    """
    from alltoallv.testing.pool import Ranks

    runner = Ranks()
    yield runner
    runner.close()
