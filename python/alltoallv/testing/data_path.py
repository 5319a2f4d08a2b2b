"""Sets environment variables for a while, such as the one that chooses a data path of shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


def data_path(path: str | None) -> AbstractContextManager[None]:
    """Makes communicators inside the block send their payload over ``path`` where it can carry it.

    Args:
        path: "inline", "push", "pull", "cma", "staged", "auto"; None leaves ALLTOALLV_PATH as it is.
    """
    return variable("ALLTOALLV_PATH", path)


@contextmanager
def variable(name: str, value: str | None) -> Iterator[None]:
    """Sets an environment variable inside the block; None leaves it as it is."""
    before = os.environ.get(name)
    os.environ.update({} if value is None else {name: value})
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif value is not None:
            del os.environ[name]
