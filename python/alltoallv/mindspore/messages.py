"""Messages of ``mindspore.mint.distributed``, with its signatures and return values.

On CPU, for contiguous tensors, without gradients. ``dst`` and ``src`` are ranks of the job, for a `Communicator` ranks
in it. They raise as `alltoallv.numpy.send`.
"""

from __future__ import annotations

from mindspore import Tensor

from alltoallv._calls import messages
from alltoallv._calls.messages import Message
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.adapter import ADAPTER
from alltoallv.mindspore.front_end import enter
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.work import CommHandle


def send(tensor: Tensor, dst: int = 0, group: Group = None, tag: int = 0) -> int:
    """Sends ``tensor`` to rank ``dst``, which calls `recv`; returns when that has received it.

    Args:
        tensor: Any shape. Copied first if it is not contiguous.
        dst: A rank of the job, not this one; for a `Communicator`, a rank in it.
        tag: Messages of one pair and one tag are received in the order of their sends, beside the collectives.

    Returns:
        0; in ``mint.distributed``, as there, None.

    Raises:
        InvalidParamError, InvalidTensorError: the arguments, on this rank alone; TypeError in ``mint.distributed``.
        PeerMismatchError: the receiver expects another size or dtype; both raise it, nothing has been written.
        PeerLostError, CommTimeoutError: the peer died, left, or did not come.
    """
    _message("send", tensor, dst, group, tag).run()
    return 0


def recv(tensor: Tensor, src: int = 0, group: Group = None, tag: int = 0) -> int:
    """Receives into ``tensor``, which is contiguous, what rank ``src`` sends with this tag; returns 0.

    Arguments and errors as of `send`.
    """
    _message("recv", tensor, src, group, tag).run()
    return 0


def isend(tensor: Tensor, dst: int = 0, group: Group = None, tag: int = 0) -> CommHandle:
    """`send` that returns at once; the tensor must not be changed until the handle's ``wait`` has returned."""
    return _post("send", tensor, dst, group, tag)


def irecv(tensor: Tensor, src: int = 0, group: Group = None, tag: int = 0) -> CommHandle:
    """`recv` that returns at once; the tensor has what was sent when the handle's ``wait`` has returned.

    Collectives may be called meanwhile.
    """
    return _post("recv", tensor, src, group, tag)


def _message(operator: str, tensor: Tensor, peer: int, group: Group, tag: int) -> Message:
    comm = enter(group)
    return messages.message(ADAPTER, comm, operator, tensor, groups.rank_in(group, peer), tag, waits=True)[0]


def _post(operator: str, tensor: Tensor, peer: int, group: Group, tag: int) -> CommHandle:
    comm = enter(group)
    message, used = messages.message(ADAPTER, comm, operator, tensor, groups.rank_in(group, peer), tag, waits=False)
    return CommHandle(comm, message.submit(), (used,), lambda: tensor)
