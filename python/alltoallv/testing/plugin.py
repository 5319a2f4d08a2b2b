"""The pytest plugin: registers the fixtures ``ranks`` and ``ranks_preload``, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from alltoallv.testing.pool import Ranks


@pytest.fixture(scope="session")
def ranks_preload() -> Sequence[str]:
    """Returns modules that are imported once for all ranks. A conftest.py may override it; see ``preload`` of
    :class:`alltoallv.testing.Ranks`.
    """
    return ()


@pytest.fixture(scope="session")
def ranks(ranks_preload: Sequence[str]) -> Iterator[Ranks]:
    """Runs a function on n ranks: ``ranks(4)(function, *args)`` calls ``function(communicator, *args)`` on
    each.

    Returns the list of results; raises RankFailures with the traceback of every rank that failed. The
    processes are kept for the next call. See :class:`alltoallv.testing.Ranks` for the options.
    """
    from alltoallv.testing import Ranks

    runner = Ranks(ranks_preload)
    yield runner
    runner.close()
