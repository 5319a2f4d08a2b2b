"""Messages of ``mindspore.mint.distributed``, with its signatures and return values.

They have no gradients. On Ascend they travel in host memory, which requires ranks of one host. ``dst`` and ``src`` are
ranks of the job; with a `Communicator` they are ranks in it. They raise the errors of `alltoallv.numpy.send`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor

from alltoallv._calls import messages
from alltoallv._calls.messages import Message
from alltoallv.communicator import Communicator
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.adapter import ADAPTER, LATE
from alltoallv.mindspore.front_end import enter
from alltoallv.mindspore.group import Group, on_host
from alltoallv.mindspore.tensors import core_name, in_queue
from alltoallv.mindspore.work import CommHandle


def send(tensor: Tensor, dst: int = 0, group: Group = None, tag: int = 0) -> int:
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
    return _run("send", tensor, dst, group, tag)


def recv(tensor: Tensor, src: int = 0, group: Group = None, tag: int = 0) -> int:
    """Receives what rank ``src`` sends with this tag into ``tensor``, which is contiguous; returns 0.

    Arguments and errors are those of `send`.
    """
    return _run("recv", tensor, src, group, tag)


def isend(tensor: Tensor, dst: int = 0, group: Group = None, tag: int = 0) -> CommHandle:
    """Sends like `send`, but returns at once; do not change the tensor until the handle's ``wait`` has returned."""
    return _post("send", tensor, dst, group, tag)


def irecv(tensor: Tensor, src: int = 0, group: Group = None, tag: int = 0) -> CommHandle:
    """Receives like `recv`, but returns at once; the tensor has the data when the handle's ``wait`` has returned.

    Collectives may be called in between.
    """
    return _post("recv", tensor, src, group, tag)


def _message(
    operator: str, tensor: Tensor, peer: int, group: Group, tag: int, *, waits: bool
) -> tuple[Communicator, Message, Any, Callable[[], Tensor]]:
    """Returns the message, the memory that it uses, and a function that returns the tensor when it is done."""
    comm, peer = enter(group), groups.rank_in(group, peer)
    if not in_queue():
        message, used = messages.message(ADAPTER, comm, operator, tensor, peer, tag, waits=waits)
        return comm, message, used, lambda: tensor
    # Device memory is copied through the host: a send in MindSpore's queue would stop all that follows it.
    comm, array = on_host(comm), LATE.read("tensor", tensor).asnumpy().copy()
    dtype = LATE.check_output("tensor", tensor) if operator == "recv" else core_name(tensor.dtype)
    make: Any = messages.recv if operator == "recv" else messages.send

    def done() -> Tensor:
        if operator == "recv":
            tensor.copy_(Tensor.from_numpy(array))
        return tensor

    return comm, make(comm, dtype, (array.ctypes.data, array.nbytes), peer, tag, waits=waits), array, done


def _run(operator: str, tensor: Tensor, peer: int, group: Group, tag: int) -> int:
    _, message, _, done = _message(operator, tensor, peer, group, tag, waits=True)
    message.run()
    done()
    return 0


def _post(operator: str, tensor: Tensor, peer: int, group: Group, tag: int) -> CommHandle:
    comm, message, used, done = _message(operator, tensor, peer, group, tag, waits=False)
    return CommHandle(comm, message.submit(), (used,), done)
