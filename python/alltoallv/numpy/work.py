"""The handle of an asynchronous call."""

from __future__ import annotations

from alltoallv._calls.handle import Ended, Handle


class Work(Handle):
    """An operator under way. The arrays that it uses stay alive until it is done, even if the handle is dropped."""


class Done(Ended, Work):
    """The handle of a call that had nothing to wait for."""
