"""Messages, and picklable objects instead of tensors, with the signatures of ``paddle.distributed``.

``dst`` and ``src`` are ranks of the job, with a `Communicator` ranks in it. Errors are as in `alltoallv.numpy.send`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor

from alltoallv import _core
from alltoallv._calls import messages
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.paddle.front_end import Group, Task, front_end, resolve

__all__ = [
    "P2POp",
    "all_gather_object",
    "batch_isend_irecv",
    "broadcast_object_list",
    "gather_object",
    "irecv",
    "isend",
    "recv",
    "recv_object_list",
    "scatter_object_list",
    "send",
    "send_object_list",
]


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


# Objects: what arrives is unpickled, which can run any code that the sender chooses: the ranks must trust each other.


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Fills ``object_list`` with every rank's ``obj``, in the order of ranks."""
    arrived = front_end.objects("all_gather", group, obj, check=_lists("object_list", object_list))
    if arrived is not None:
        object_list[:] = arrived


def broadcast_object_list(object_list: list[Any], src: int, group: Group = None) -> None:
    """Replaces the entries of ``object_list`` by the entries of rank ``src``."""
    check = _lists("object_list", object_list)
    arrived = front_end.objects("broadcast", group, object_list, root=("src", src), check=check)
    if arrived is not None:
        object_list[:] = arrived


def gather_object(obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0, group: Group = None) -> None:
    """Fills ``object_gather_list`` of rank ``dst`` with every rank's ``obj``, in the order of ranks; others need none.

    Paddle has no such function; the signature is torch's and MindSpore's.
    """

    def check(size: int, at_root: bool) -> None:
        if at_root:
            _lists("object_gather_list", object_gather_list)(size, at_root)

    arrived = front_end.objects("gather", group, obj, root=("dst", dst), check=check)
    if arrived is not None and object_gather_list is not None:
        object_gather_list[:] = arrived


def scatter_object_list(
    out_object_list: list[Any], in_object_list: list[Any] | None = None, src: int = 0, group: Group = None
) -> None:
    """Sets ``out_object_list`` of rank j to ``[in_object_list[j]]`` of rank ``src``, which has one entry per rank."""
    lists: Any = {"check": _lists("out_object_list", out_object_list), "name": "in_object_list"}
    if resolve(group) is not None:
        out_object_list[:] = [front_end.objects("scatter", group, in_object_list, root=("src", src), **lists)]


def send_object_list(
    object_list: list[Any], dst: int | None = None, group: Group = None, dst_in_group: int | None = None
) -> None:
    """Sends the entries of ``object_list`` to rank ``dst`` (``dst_in_group`` in the group)."""
    member = _peer("dst", object_list, dst, dst_in_group, group)
    if member is not None:
        messages.send(member[0], object_list, member[1])


def recv_object_list(
    object_list: list[Any], src: int | None = None, group: Group = None, src_in_group: int | None = None
) -> None:
    """Fills ``object_list`` with what rank ``src`` (``src_in_group`` in the group) sends, as many entries."""
    member = _peer("src", object_list, src, src_in_group, group)
    if member is not None:
        object_list[:] = messages.recv(member[0], len(object_list), member[1])


def _peer(
    name: str, object_list: Any, rank: int | None, in_group: int | None, group: Group
) -> tuple[Communicator, int] | None:
    """Returns the communicator, and the other rank in it; None on a rank outside the group."""
    comm = resolve(group)
    if comm is None:
        return None
    if not object_list:
        raise InvalidParamError("object_list cannot be None or empty", id=1415)
    if in_group is None:
        return comm, front_end.checked_rank(comm, group, name, 0 if rank is None else rank)
    if rank is not None:
        raise InvalidParamError(f"Cannot specify both '{name}' and '{name}_in_group' arguments.", id=1416)
    _core.checked_rank(f"{name}_in_group", in_group, comm.size)
    return comm, in_group


def _lists(name: str, values: Any) -> Callable[..., None]:
    def check(size: int, at_root: bool) -> None:
        if not isinstance(values, list):
            raise TypeError(f"{name} is a {type(values).__name__}, expected a list")

    return check
