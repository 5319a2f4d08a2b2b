"""Settings that all tests share; the fixtures for ranks come with the plugin in alltoallv.testing."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from alltoallv.errors import BackendUnavailableError
from alltoallv.testing import Ranks
from alltoallv.testing.hosts import Host, joined_hosts

# Examples run collectives, whose time says nothing about the code under test. In CI the same ones each time.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# Tests that stop a rank in the middle of a copy want one that makes it alone, on however many processors.
os.environ.setdefault("ALLTOALLV_COPY_THREADS", "1")

# Ranks are forked from a process that has imported NumPy, which shall have no thread of OpenBLAS's by then.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell starts its background jobs with Ctrl-C ignored, which programs under test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks_preload() -> tuple[str, ...]:
    return "alltoallv.numpy", "ml_dtypes"


@pytest.fixture(params=["processes", "threads"])
def launch(request: pytest.FixtureRequest, ranks: Ranks) -> Callable[..., list[Any]]:
    """``launch(size, function, *arguments, **options)`` runs ``function(communicator, *arguments)`` on every rank.

    Once on ranks that are processes, and once on ranks that are threads; the options are as in `Ranks`.
    """
    threads = request.param == "threads"

    def run(size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        return ranks(size, threads=threads, **options)(function, *arguments)

    return run


@pytest.fixture(scope="session")
def two_hosts() -> Callable[..., contextlib.AbstractContextManager[list[Host]]]:
    """`joined_hosts`; skips where a program is missing or the machine forbids them, not where a command fails."""

    @contextlib.contextmanager
    def joined_or_skipped(limit: tuple[str, str, str] | None = None, count: int = 2) -> Iterator[list[Host]]:
        with contextlib.ExitStack() as stack:
            try:
                hosts = stack.enter_context(joined_hosts(limit, count))
            except BackendUnavailableError as error:
                pytest.skip(f"no {count} hosts on this machine: {error}")
            yield hosts

    return joined_or_skipped
