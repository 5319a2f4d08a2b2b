"""The handle of an asynchronous call."""

from __future__ import annotations

from alltoallv._calls.handle import Ended, Handle


class CommHandle(Handle):
    """An operator under way, with the method of MindSpore's ``CommHandle``, `wait`, and a few more.

    The tensors it uses stay alive until it is done, also when the handle is dropped.
    """


class Done(Ended, CommHandle):
    """The handle of a call that was not asynchronous after all."""
