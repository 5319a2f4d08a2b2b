"""Messages of ``mindspore.mint.distributed``, with its signatures and return values.

They have no gradients: inside a gradient function a tensor that wants one is refused. On Ascend they travel in host
memory, which requires ranks of one host. ``dst`` and ``src`` are ranks of the job; with a `Communicator` they are ranks
in it. They raise the errors of `alltoallv.numpy.send`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor

from alltoallv._calls import messages
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.front_end import LATE, enter, front_end, refuse_gradient
from alltoallv.mindspore.group import Group, on_host
from alltoallv.mindspore.tensors import CommHandle, core_name, in_queue

__all__ = ["irecv", "isend", "recv", "send"]


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
    message("send", tensor, dst, group, tag, waits=True)()
    return 0


def recv(tensor: Tensor, src: int = 0, group: Group = None, tag: int = 0) -> int:
    """Receives what rank ``src`` sends with this tag into ``tensor``, which is contiguous; returns 0.

    Arguments and errors are as for `send`.
    """
    message("recv", tensor, src, group, tag, waits=True)()
    return 0


def isend(tensor: Tensor, dst: int = 0, group: Group = None, tag: int = 0) -> CommHandle:
    """Sends like `send`, but returns at once; do not change the tensor until the handle's ``wait`` has returned."""
    return message("send", tensor, dst, group, tag)()


def irecv(tensor: Tensor, src: int = 0, group: Group = None, tag: int = 0) -> CommHandle:
    """Receives like `recv`, but returns at once; the tensor has the data when the handle's ``wait`` has returned.

    Collectives may be called in between.
    """
    return message("recv", tensor, src, group, tag)()


def message(
    operator: str, tensor: Tensor, peer: int, group: Group, tag: int = 0, *, waits: bool = False
) -> Callable[[], Any]:
    """Checks a ``"send"`` or ``"recv"`` and returns what runs it, or, if it does not wait, starts it for the handle."""
    name = "dst" if operator == "send" else "src"
    refuse_gradient(operator, tensor)
    if not in_queue():
        return front_end.message(operator, group, tensor, (name, peer), waits=waits, tag=tag)
    # Device memory is copied through the host: a send in MindSpore's queue would stop all that follows it.
    comm, rank = on_host(enter(group)), groups.rank_in(group, peer, name)
    array = LATE.read("tensor", tensor).asnumpy().copy()
    dtype = LATE.check_output("tensor", tensor) if operator == "recv" else core_name(tensor.dtype)

    def done() -> Tensor:
        if operator == "recv":
            tensor.copy_(Tensor.from_numpy(array))
        return tensor

    post = messages.post(operator, comm, dtype, (array.ctypes.data, array.nbytes), rank, tag, waits=waits)

    def start() -> Any:
        if not waits:
            return CommHandle(comm, post.submit(), (array,), done)
        post.run()
        return done()

    return start
