"""Messages between two ranks, with the signatures, return values and error classes of ``mindspore.mint.distributed``.

``dst`` and ``src`` are ranks of the job.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from mindspore import Tensor

from alltoallv._calls import messages as calls
from alltoallv.errors import AllToAllVError
from alltoallv.mindspore import messages
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.mint.checks import as_mint
from alltoallv.mindspore.work import CommHandle


@functools.partial(as_mint, message=True)
def send(tensor: Tensor, dst: int = 0, group: Group = None, tag: int = 0) -> None:
    """Sends ``tensor`` to rank ``dst``, which calls `recv`; returns when that rank has received it.

    Args:
        tensor: Any shape; copied first if it is not contiguous.
        dst: A rank of the job, not this one; with a `Communicator`, a rank in it.
        tag: Messages of one pair and one tag arrive in the order in which they were sent, independent of collectives.

    Returns:
        0; in ``mint.distributed`` None, as in MindSpore.

    Raises:
        InvalidParamError, InvalidTensorError: an argument is wrong; only this rank raises it, as TypeError in ``mint``.
        PeerMismatchError: the receiver expects another size or dtype; both ranks raise it, and nothing is written.
        PeerLostError, CommTimeoutError: the peer died, left, or did not come.
    """
    messages.send(tensor, dst, group, tag)


recv = as_mint(messages.recv, message=True)
isend = as_mint(messages.isend, message=True)
irecv = as_mint(messages.irecv, message=True)


class P2POp(calls.P2POp):
    """One message of `batch_isend_irecv`.

    Args:
        op: ``isend`` or ``irecv``, as function or name.
        tensor: The data to send, or the memory to receive into.
        peer: The other rank, by its number in the job.
        group: The group, the same for all messages of a batch.
        tag: Must be 0.

    Raises:
        TypeError: an argument has another type.
        NotImplementedError: ``tag`` is not 0.
    """

    refusal: ClassVar[type[Exception]] = TypeError
    expected = "Expected op to be of type isend or irecv"

    def __init__(self, op: str | Callable[..., Any], tensor: Tensor, peer: int, group: Group = None, tag: int = 0):
        super().__init__(op, tensor, peer, group, tag)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"Expected tensor to be Tensor, but got {type(tensor)}.")
        if not isinstance(peer, int):
            raise TypeError(f"For P2POp, the peer must be int, but got {type(peer)}")
        if tag != 0:
            raise NotImplementedError("tag is not support yet.")


class _All(CommHandle):
    """The handle of several messages."""

    def __init__(self, handles: list[CommHandle]) -> None:
        self._handles = handles

    def wait(self, timeout: float | None = None) -> None:  # type: ignore[override]
        errors = []
        for handle in self._handles:
            try:
                handle.wait(timeout)
            except AllToAllVError as error:  # the others go on, and use the caller's tensors
                errors.append(error)
        if errors:
            raise errors[0]

    def result(self) -> list[Any]:
        """Returns the tensors, after a wait."""
        self.wait()
        return [handle.result() for handle in self._handles]

    def is_completed(self) -> bool:
        """True once all messages have succeeded or failed."""
        return all(handle.is_completed() for handle in self._handles)

    def exception(self) -> BaseException | None:
        """Returns the exception of the first message that failed."""
        return next((error for handle in self._handles if (error := handle.exception())), None)


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[CommHandle]:
    """Starts all messages of the list at once, in its order; they may go to the same rank and come from it.

    If one is refused, none is started.

    Returns:
        A list with one handle, whose ``wait`` returns when all messages are done.

    Raises:
        TypeError: the list is empty, has elements other than `P2POp`, or groups that differ.
    """
    if not p2p_op_list:
        raise TypeError("p2p_op_list can not be empty list.")
    for op in p2p_op_list:
        if not isinstance(op, P2POp):
            raise TypeError(f"The elements in p2p_op_list must be type of P2POp, but got {type(op)}.")
        if op.group != p2p_op_list[0].group:
            raise TypeError("The group name in p2p_op_list must be consistent.")
    starts = [messages.message("send" if op.sends else "recv", op.tensor, op.peer, op.group) for op in p2p_op_list]
    return [_All([start() for start in starts])]
