"""The handle of an asynchronous call."""

from __future__ import annotations

from alltoallv._calls.handle import Handle


class Work(Handle):
    """An operator under way. The arrays that it uses stay alive until it is done, even if the handle is dropped."""
