"""Messages with the signatures of ``paddle.distributed``.

``dst`` and ``src`` are ranks of the job, with a `Communicator` ranks in it. Errors are as in `alltoallv.numpy.send`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import Tensor

from alltoallv._calls import messages
from alltoallv.paddle.front_end import front_end
from alltoallv.paddle.group import Group
from alltoallv.paddle.work import Task


def send(tensor: Tensor, dst: int = 0, group: Group = None, sync_op: bool = True) -> Task | None:
    """Sends ``tensor`` to rank ``dst``; with ``sync_op=True`` it returns when that rank has received it.

    Messages of one pair arrive in the order in which they were sent, independent of collectives.
    """
    return front_end.message("send", group, tensor, ("dst", dst), waits=sync_op, to_itself=False)


def recv(tensor: Tensor, src: int = 0, group: Group = None, sync_op: bool = True) -> Task | None:
    """Receives what rank ``src`` sends into ``tensor``, which has the same dtype and number of elements."""
    return front_end.message("recv", group, tensor, ("src", src), waits=sync_op, to_itself=False)


def isend(tensor: Tensor, dst: int, group: Group = None) -> Task | None:
    """Sends like `send`, but returns at once; do not change the tensor until the task's ``wait`` has returned."""
    return send(tensor, dst, group, sync_op=False)


def irecv(tensor: Tensor, src: int | None = None, group: Group = None) -> Task | None:
    """Receives like `recv`, but returns at once; ``src=None`` means 0, as in Paddle. Collectives may be called in
    between.
    """
    return recv(tensor, 0 if src is None else src, group, sync_op=False)


class P2POp(messages.P2POp):
    """One message of `batch_isend_irecv`: ``op`` is `isend` or `irecv`, from here or from Paddle, or its name.

    Raises:
        RuntimeError: ``op`` is something else; the text is Paddle's.
    """

    refusal, expected = (
        RuntimeError,
        (
            "Invalid ``op`` function. Expected ``op`` to be of type ``paddle.distributed.isend`` or "
            "``paddle.distributed.irecv``"
        ),
    )

    def __init__(self, op: Callable[..., Any] | str, tensor: Tensor, peer: int, group: Group = None) -> None:
        super().__init__(op, tensor, peer, group)


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Task]:
    """Starts all messages of the list at once, in its order, and returns their tasks.

    Raises:
        RuntimeError: the argument is not a list of `P2POp`; the text is Paddle's.
    """
    if not isinstance(p2p_op_list, list) or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise RuntimeError(
            "Invalid ``p2p_op_list``. Each op is expected to to be of type ``paddle.distributed.P2POp``."
        )
    tasks = [(isend if op.sends else irecv)(op.tensor, op.peer, op.group) for op in p2p_op_list]
    return [task for task in tasks if task is not None]
