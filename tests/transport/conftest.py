"""Ranks for the transport tests, on one data path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from exchange_cases import Launch

from alltoallv import Communicator
from alltoallv.testing import run_ranks


@pytest.fixture(scope="session")
def cma_permitted() -> bool:
    """Whether the kernel lets processes of one user read each other's memory."""
    return all(run_ranks(2, lambda communicator: bool(communicator.stats()["cma_permitted"])))


@pytest.fixture
def launch(request: pytest.FixtureRequest, launch: Launch, cma_permitted: bool) -> Launch:
    """Of all tests; skips the test where ``path="cma"`` is asked for and process_vm_readv is not permitted."""
    processes = request.node.callspec.params["launch"] == "processes"

    def run(size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        if options.get("path") == "cma" and processes and not cma_permitted:
            pytest.skip("process_vm_readv between processes is not permitted here (Yama, seccomp or capabilities)")
        return launch(size, function, *arguments, **options)

    return run


@pytest.fixture
def one_rank() -> Any:
    """A communicator of one rank in this process."""
    [communicator] = Communicator.threads(1)
    yield communicator
    communicator.destroy()
