"""The handle of a call."""

from __future__ import annotations

from alltoallv._calls.handle import Ended, Handle


class Task(Handle):
    """An operator under way or done, with the methods of Paddle's task.

    The tensors it uses stay alive until it is done, also when the handle is dropped.
    """

    def is_sync(self) -> bool:
        """Whether the call had ended when it returned this handle."""
        return False

    def synchronize(self) -> None:
        """Waits as `wait` does: the memory is the host's."""
        self.wait()


class Done(Ended, Task):
    """The handle of a call with ``sync_op=True``."""

    def is_sync(self) -> bool:
        """True."""
        return True
