"""The handle of an asynchronous call."""

from __future__ import annotations

from alltoallv._calls.handle import Handle


class Work(Handle):
    """An operator under way. The arrays it uses stay alive until it is done, also when the handle is dropped."""
