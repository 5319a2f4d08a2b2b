"""Messages between two ranks, with the signatures, return values and error classes of ``mindspore.mint.distributed``.

They go beside the collectives and have no gradients. ``dst`` and ``src`` are ranks of the job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor

from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import group as groups
from alltoallv.mindspore import messages
from alltoallv.mindspore.front_end import enter
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.mint.checks import check_rank
from alltoallv.mindspore.work import CommHandle


def send(tensor: Tensor, dst: int = 0, group: Group = None, tag: int = 0) -> None:
    """Sends ``tensor`` to rank ``dst``; returns when that has received it.

    Messages of one pair and one tag are received in the order of their sends.

    Raises:
        TypeError: ``tensor``, ``dst`` or ``group`` is of another type.
        ValueError: ``dst`` is this rank, or no rank of the group.
        PeerMismatchError: the receiver expects another size or dtype; both raise it, nothing has been written.
        PeerLostError, CommTimeoutError: the peer died, left, or did not come.
    """
    _check("send", tensor, "dst", dst, group)
    messages.send(tensor, dst, group, tag)


def recv(tensor: Tensor, src: int = 0, group: Group = None, tag: int = 0) -> int:
    """Receives into ``tensor`` what rank ``src`` sends with this tag; returns 0.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    _check("recv", tensor, "src", src, group)
    messages.recv(tensor, src, group, tag)
    return 0


def isend(tensor: Tensor, dst: int = 0, group: Group = None, tag: int = 0) -> CommHandle:
    """`send` that returns at once; the tensor must not be changed until the handle's ``wait`` has returned."""
    _check("isend", tensor, "dst", dst, group)
    return messages.isend(tensor, dst, group, tag)


def irecv(tensor: Tensor, src: int = 0, group: Group = None, tag: int = 0) -> CommHandle:
    """`recv` that returns at once; the tensor has what was sent when the handle's ``wait`` has returned."""
    _check("irecv", tensor, "src", src, group)
    return messages.irecv(tensor, src, group, tag)


def _check(operator: str, tensor: Any, name: str, peer: Any, group: Group) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"For {operator}, the input tensor must be tensor, but got {type(tensor)}")
    check_rank(operator, name, peer)
    check_other(operator, name, peer, group)


def check_other(operator: str, name: str, peer: int, group: Group) -> None:
    """Refuses this rank itself as the peer of a message."""
    comm = enter(group)
    if groups.rank_in(group, peer) == comm.rank:
        raise InvalidParamError(f"For {operator}, {name} is {peer}, this rank itself, expected another one")


class P2POp:
    """One message of `batch_isend_irecv`.

    Args:
        op: ``isend`` or ``irecv``, the function or its name.
        tensor: What to send, or where to receive.
        peer: The other rank, by its number in the job.
        group: The same for all messages of a batch.
        tag: 0.

    Raises:
        TypeError: an argument of another type.
        NotImplementedError: another tag.
    """

    def __init__(self, op: str | Callable[..., Any], tensor: Tensor, peer: int, group: Group = None, tag: int = 0):
        name = op if isinstance(op, str) else getattr(op, "__name__", "")
        if name not in ("isend", "irecv"):
            raise TypeError(f"Expected op to be of type isend or irecv, but got {op}")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"Expected tensor to be Tensor, but got {type(tensor)}.")
        if not isinstance(peer, int):
            raise TypeError(f"For P2POp, the peer must be int, but got {type(peer)}")
        if tag != 0:
            raise NotImplementedError("tag is not support yet.")
        self.op, self.tensor, self.peer, self.group, self.tag = op, tensor, peer, group, tag

    @property
    def sends(self) -> bool:
        """Whether it is an ``isend``."""
        return (self.op if isinstance(self.op, str) else self.op.__name__) == "isend"


class _All(CommHandle):
    """The handle of several messages."""

    def __init__(self, handles: list[CommHandle]) -> None:
        self._handles = handles

    def _wait(self, timeout: float | None = None) -> list[Any]:
        return [handle._wait(timeout) for handle in self._handles]

    def result(self) -> list[Any]:
        """The tensors, after a wait."""
        return self._wait()

    def is_completed(self) -> bool:
        """True once all have succeeded or failed."""
        return all(handle.is_completed() for handle in self._handles)

    def exception(self) -> BaseException | None:
        """What the first that failed has raised."""
        return next((error for handle in self._handles if (error := handle.exception())), None)


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[CommHandle]:
    """Starts all messages of the list at once, in its order; they may go to the same rank and come from it.

    Returns:
        A list of one handle, whose ``wait`` returns when all are done.

    Raises:
        TypeError: an empty list, other elements than `P2POp`, or groups that differ.
    """
    if not p2p_op_list:
        raise TypeError("p2p_op_list can not be empty list.")
    for op in p2p_op_list:
        if not isinstance(op, P2POp):
            raise TypeError(f"The elements in p2p_op_list must be type of P2POp, but got {type(op)}.")
        if op.group != p2p_op_list[0].group:
            raise TypeError("The group name in p2p_op_list must be consistent.")
    starts = [(messages.isend if op.sends else messages.irecv, op) for op in p2p_op_list]
    return [_All([start(op.tensor, op.peer, op.group, op.tag) for start, op in starts])]
