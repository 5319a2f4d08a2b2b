"""Messages with the signatures of ``paddle.distributed``.

``dst`` and ``src`` are ranks of the job, with a `Communicator` ranks in it. Errors are as in `alltoallv.numpy.send`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor

from alltoallv._calls import messages
from alltoallv.paddle.front_end import front_end
from alltoallv.paddle.group import Group
from alltoallv.paddle.work import Task

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"]


def send(tensor: Tensor, dst: int = 0, group: Group = None, sync_op: bool = True) -> Task | None:
    """Sends ``tensor`` to rank ``dst``; with ``sync_op=True`` it returns when that rank has received it.

    Messages of one pair arrive in the order in which they were sent, independent of collectives.
    """
    return _message("send", group, tensor, dst, waits=sync_op)()


def recv(tensor: Tensor, src: int = 0, group: Group = None, sync_op: bool = True) -> Task | None:
    """Receives what rank ``src`` sends into ``tensor``, which has the same dtype and number of elements."""
    return _message("recv", group, tensor, src, waits=sync_op)()


def isend(tensor: Tensor, dst: int, group: Group = None) -> Task | None:
    """Sends like `send`, but returns at once; do not change the tensor until the task's ``wait`` has returned."""
    return _message("send", group, tensor, dst)()


def irecv(tensor: Tensor, src: int | None = None, group: Group = None) -> Task | None:
    """Receives like `recv`, but returns at once; ``src=None`` means 0, as in Paddle. Collectives may be called in
    between.
    """
    return _message("recv", group, tensor, 0 if src is None else src)()


def _message(
    operator: str, group: Group, tensor: Tensor, rank: int, *, waits: bool = False
) -> Callable[[], Task | None]:
    """Checks a message and returns what starts it."""
    peer = "dst" if operator == "send" else "src", rank
    return front_end.message(operator, group, tensor, peer, waits=waits, to_itself=False)


class P2POp(messages.P2POp):
    """One message of `batch_isend_irecv`: ``op`` is `isend` or `irecv`, from here or from Paddle, or its name.

    Raises:
        RuntimeError: ``op`` is something else; the text is Paddle's.
    """

    refusal = RuntimeError
    expected = (
        "Invalid ``op`` function. Expected ``op`` to be of type ``paddle.distributed.isend`` or "
        "``paddle.distributed.irecv``"
    )

    def __init__(self, op: Callable[..., Any] | str, tensor: Tensor, peer: int, group: Group = None) -> None:
        super().__init__(op, tensor, peer, group)


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Task]:
    """Starts all messages of the list at once, in its order, and returns their tasks; if one is refused, none.

    Paddle's own ``P2POp`` also serve.

    Raises:
        RuntimeError: the argument is not a list of `P2POp`; the text is Paddle's.
    """
    if not isinstance(p2p_op_list, list) or not all(
        isinstance(op, P2POp | paddle.distributed.P2POp) for op in p2p_op_list
    ):
        raise RuntimeError(
            "Invalid ``p2p_op_list``. Each op is expected to to be of type ``paddle.distributed.P2POp``."
        )
    ours = [op if isinstance(op, P2POp) else P2POp(op.op, op.tensor, op.peer, op.group) for op in p2p_op_list]
    starts = [_message("send" if op.sends else "recv", op.group, op.tensor, op.peer) for op in ours]
    return [task for start in starts if (task := start()) is not None]
