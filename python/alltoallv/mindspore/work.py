"""The handle of an asynchronous call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alltoallv import _core
from alltoallv.communicator import Communicator


class CommHandle:
    """An operator under way, with the method of MindSpore's ``CommHandle``, `wait`, and a few more.

    The tensors it uses stay alive until it is done, also when the handle is dropped.
    """

    def __init__(
        self, communicator: Communicator, core: _core.Work, keep: tuple[Any, ...], finish: Callable[[], Any]
    ) -> None:
        self._core = core
        self._keep: tuple[Any, ...] | None = keep
        self._finish = finish
        self._result: Any = None
        communicator.keep(self)

    def wait(self) -> None:
        """Blocks until the operator is done.

        Raises:
            AllToAllVError: whatever the operator raised.
        """
        self._core.wait()
        if self._keep is not None:
            self._result = self._finish()
            self._keep = None

    def is_completed(self) -> bool:
        """True once the operator has succeeded or failed."""
        return self._core.done()

    def result(self) -> Any:
        """The output, after a wait."""
        self.wait()
        return self._result
