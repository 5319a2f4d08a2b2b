"""The handle of a call."""

from __future__ import annotations

from alltoallv._calls.handle import Ended, Handle


class Task(Handle):
    """An operator under way or done, with the methods of Paddle's task.

    The tensors that it uses stay alive until it is done, even if the handle is dropped.
    """

    def is_sync(self) -> bool:
        """True if the call had ended when it returned this handle."""
        return False

    def synchronize(self) -> None:
        """Waits like `wait`: the memory is the host's."""
        self.wait()


class Done(Ended, Task):
    """The handle of a call with ``sync_op=True``."""

    def is_sync(self) -> bool:
        """Returns True."""
        return True
