"""Two hosts on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from alltoallv.errors import BackendUnavailableError
from alltoallv.testing.hosts import Host, joined_hosts


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[Host]]:
    try:
        with joined_hosts() as hosts:
            yield hosts
    except BackendUnavailableError as error:
        pytest.skip(f"no two hosts on this machine: {error}")
