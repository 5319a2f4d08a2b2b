"""Settings that all tests share; the fixtures for ranks come with the plugin in alltoallv.testing."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from alltoallv.errors import BackendUnavailableError
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
