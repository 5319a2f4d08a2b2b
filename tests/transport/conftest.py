"""Ranks for the transport tests: processes or threads, on one data path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from exchange_cases import Launch

from alltoallv import Communicator
from alltoallv.testing import Ranks


@pytest.fixture(scope="session")
def cma_permitted() -> bool:
    """Whether the kernel lets processes of one user read each other's memory."""
    from alltoallv.testing import run_ranks

    return all(run_ranks(2, lambda communicator: bool(communicator.stats()["cma_permitted"])))


@pytest.fixture(params=["processes", "threads"])
def launch(request: pytest.FixtureRequest, ranks: Ranks, cma_permitted: bool) -> Launch:
    """Runs a function on ranks, once as processes and once as threads; see `Launch`.

    ``path="cma"`` skips the test where process_vm_readv is not permitted.
    """
    threads = request.param == "threads"

    def run(size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        if options.get("path") == "cma" and not cma_permitted and not threads:
            pytest.skip("process_vm_readv between processes is not permitted here (Yama, seccomp or capabilities)")
        return ranks(size, threads=threads, **options)(function, *arguments)

    return run


@pytest.fixture
def one_rank() -> Any:
    """A communicator of one rank in this process."""
    [communicator] = Communicator.threads(1)
    yield communicator
    communicator.destroy()
