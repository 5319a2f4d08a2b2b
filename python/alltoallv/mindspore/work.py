"""The handle of an asynchronous call."""

from __future__ import annotations

from alltoallv._calls.handle import Ended, Handle


class CommHandle(Handle):
    """A running operator, with `wait`, the method of MindSpore's ``CommHandle``, and a few more.

    The tensors that it uses stay alive until it is done, even if the handle is dropped.
    """


class Done(Ended, CommHandle):
    """The handle of a call that ended before it returned."""
