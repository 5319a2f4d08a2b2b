"""Sends all payload over one data path of shared memory instead of the one that the core would choose."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def data_path(path: str | None) -> Iterator[None]:
    """Makes communicators inside the block send their payload over ``path`` where it can carry it.

    Args:
        path: "inline", "push", "pull", "cma", "staged", "auto"; None leaves ALLTOALLV_PATH as it is.
    """
    before = os.environ.get("ALLTOALLV_PATH")
    if path is not None:
        os.environ["ALLTOALLV_PATH"] = path
    try:
        yield
    finally:
        if path is not None:
            os.environ.pop("ALLTOALLV_PATH")
            if before is not None:
                os.environ["ALLTOALLV_PATH"] = before
