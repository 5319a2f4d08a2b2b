"""The functions of ``mindspore.communication.comm_func``, which return their outputs, and the functions about groups.

They use `alltoallv.mindspore.distributed` and raise its errors; signatures and return values are MindSpore's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from mindspore import Tensor, ops
from mindspore._c_expression import GroupOptions
from mindspore._c_expression.typing import Type

from alltoallv._calls.counts import rows_of
from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError
from alltoallv.launch import detect as launch
from alltoallv.mindspore import distributed as dist
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.exchange import all_to_all_v
from alltoallv.mindspore.front_end import assign, check_async, enter
from alltoallv.mindspore.tensors import CommHandle, check_tensor, empty

WORLD = groups.WORLD[0]


def all_reduce(
    tensor: Tensor, op: str = "sum", group: str = WORLD, async_op: bool = False
) -> tuple[Tensor, CommHandle | None]:
    """Returns the reduction of all ranks' tensors, and the handle with ``async_op=True``."""
    with _checks("all_reduce", group):
        output = _copy(tensor)
    return output, dist.all_reduce(output, op, group, async_op)


def reduce(tensor: Tensor, dst: int, op: str = "sum", group: str = WORLD) -> Tensor:
    """Returns the reduction of all ranks' tensors on rank ``dst``, and a copy of the own tensor elsewhere."""
    with _checks("reduce", group):
        output = _copy(tensor)
    dist.reduce(output, dst, op, group)
    return output


def broadcast(tensor: Tensor, src: int = 0, group: str = WORLD) -> Tensor:
    """Returns the tensor of rank ``src``."""
    with _checks("broadcast", group):
        output = _copy(tensor)
    dist.broadcast(output, src, group)
    return output


def all_gather_into_tensor(
    tensor: Tensor, group: str = WORLD, async_op: bool = False
) -> tuple[Tensor, CommHandle | None]:
    """Returns all ranks' tensors along dimension 0, and the handle with ``async_op=True``."""
    with _checks("all_gather_into_tensor", group):
        output = _rows(tensor, _length(tensor) * enter(group).size)
    return output, dist.all_gather_into_tensor(output, tensor, group, async_op)


def reduce_scatter_tensor(
    tensor: Tensor, op: str = "sum", group: str = WORLD, async_op: bool = False
) -> tuple[Tensor, CommHandle | None]:
    """Returns this rank's part along dimension 0 of the reduction, and the handle with ``async_op=True``."""
    with _checks("reduce_scatter", group):
        output = _rows(tensor, _share(tensor, group))
    return output, dist.reduce_scatter_tensor(output, tensor, op, group, async_op)


def scatter_tensor(tensor: Tensor, src: int = 0, group: str = WORLD) -> Tensor:
    """Returns this rank's part along dimension 0 of rank ``src``'s tensor; the other ranks' tensors give the shape."""
    with _checks("scatter", group):
        output = _rows(tensor, _share(tensor, group))
        parts = list(tensor.split(output.shape[0]))
    dist.scatter(output, parts, src, group)
    return output


def gather_into_tensor(tensor: Tensor, dst: int = 0, group: str = WORLD) -> Tensor:
    """Returns all ranks' tensors along dimension 0 on rank ``dst``; elsewhere, as in MindSpore, ``[0]``."""
    comm = enter(group)
    with _checks("gather", group):
        rows = _length(tensor)
        at_root = groups.rank_in(group, dst, "dst") == comm.rank
        output = _rows(tensor, rows * comm.size) if at_root else ops.zeros(1, tensor.dtype)
        parts = list(output.split(rows)) if at_root else []
    dist.gather(tensor, parts, dst, group)
    return output


def all_to_all_with_output_shape(
    output_shape_list: Sequence[Any],
    input_tensor_list: Sequence[Tensor],
    group: str | None = None,
    async_op: bool = False,
) -> tuple[tuple[Tensor, ...], CommHandle | None]:
    """Returns the received tensors in the given shapes (tensors or tuples), and the handle with ``async_op=True``."""
    with _checks("all_to_all", group):
        lists = input_tensor_list, output_shape_list
        if not all(isinstance(each, list | tuple) and each for each in lists):
            raise TypeError(f"Expected lists or tuples of tensors and of shapes, but got {lists}")
        for tensor in input_tensor_list:
            check_tensor("input_tensor_list", tensor)
        outputs = [empty(_shape(shape), input_tensor_list[0].dtype) for shape in output_shape_list]
    return tuple(outputs), dist.all_to_all(outputs, input_tensor_list, group, async_op)


def all_to_all_single_with_output_shape(
    output_shape: Any,
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: str | None = None,
    async_op: bool = False,
) -> tuple[Tensor, CommHandle | None]:
    """Returns the output of `all_to_all_single`, a new tensor of that shape, and the handle with ``async_op=True``."""
    with _checks("all_to_all_single", group):
        check_tensor("tensor", tensor)
        output = empty(_shape(output_shape), tensor.dtype)
    handle = dist.all_to_all_single(
        output, tensor, output_split_sizes or None, input_split_sizes or None, group, async_op
    )
    return output, handle


def all_to_all_v_c(
    output: Tensor, input: Tensor, send_count_matrix: list[int], group: str | None = None, async_op: bool = False
) -> CommHandle | None:
    """Exchanges rows into ``output``; rank i sends ``send_count_matrix[i * W + j]`` rows to rank j."""
    comm = enter(group)
    size, rank = comm.size, comm.rank
    with _checks("all_to_all_v", group):
        check_tensor("output", output)
        check_async(async_op)
        if not isinstance(send_count_matrix, list) or not all(isinstance(n, int) for n in send_count_matrix):
            raise TypeError(f"send_count_matrix must be list of int, but got {send_count_matrix!r}")
        if len(send_count_matrix) != size * size:
            entries = len(send_count_matrix)
            raise TypeError(f"send_count_matrix must be square matrix of {size} rows, but got {entries}.")
    sends, recvs = send_count_matrix[rank * size : (rank + 1) * size], send_count_matrix[rank::size]
    options: dict[str, Any] = {"unit": "row", "out": output, "group": group, "async_op": async_op}
    result: Any = all_to_all_v(input, sends, recvs, **options)
    return result[1] if async_op else None


def barrier(group: str = WORLD) -> None:
    """Returns when every rank has called it."""
    dist.barrier(group)


send, isend = dist.send, dist.isend


def recv(tensor: Tensor, src: int = 0, group: str = WORLD, tag: int = 0) -> Tensor:
    """Returns what rank ``src`` sends, in a new tensor like the given one."""
    output = _like(tensor)
    dist.recv(output, src, group, tag)
    return output


def irecv(tensor: Tensor, src: int = 0, group: str = WORLD, tag: int = 0) -> tuple[Tensor, CommHandle]:
    """Returns a new tensor like the given one; rank ``src`` has filled it when the handle's ``wait`` has returned."""
    output = _like(tensor)
    return output, dist.irecv(output, src, group, tag)


class P2POp(dist.P2POp):
    """One message of `batch_isend_irecv`; to receive, ``tensor`` may also be a shape, with ``recv_dtype``.

    ``recv_dtype`` changes nothing where ``tensor`` is a tensor.
    """

    refusal: ClassVar[type[Exception]] = ValueError

    def __init__(
        self, op: Any, tensor: Any, peer: int, group: str | None = None, tag: int = 0, *, recv_dtype: Any = None
    ) -> None:
        if recv_dtype is not None and not isinstance(recv_dtype, Type):
            raise TypeError(f"recv_dtype must be type of mindspore dtype, but got type of {type(recv_dtype)}")
        if isinstance(tensor, tuple):
            if recv_dtype is None:
                raise ValueError("recv_dtype is None, expected a dtype where tensor is a shape")
            tensor = empty(tensor, recv_dtype)
        super().__init__(op, tensor, peer, group, tag)
        if not self.sends:
            self.tensor = _like(tensor)
        self.recv_dtype = recv_dtype


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> tuple[Tensor, ...]:
    """Returns the received tensors in the order of the list, with 0 in place of each send."""
    if not isinstance(p2p_op_list, list):
        raise TypeError(f"p2p_op_list must be type of list, but got type of {type(p2p_op_list)}.")
    dist.batch_isend_irecv(list(p2p_op_list))[0].wait()
    return tuple(Tensor(0, op.tensor.dtype) if op.sends else op.tensor for op in p2p_op_list)


def init(backend_name: str | None = None) -> None:
    """Joins all ranks of the job, under every launcher; collective.

    Args:
        backend_name: None, ``"hccl"``, ``"nccl"`` or ``"mccl"``; on CPU the ranks use shared memory with all of them.

    Raises:
        TypeError: ``backend_name`` is no string.
        RuntimeError: it is another name.
    """
    if backend_name is not None and not isinstance(backend_name, str):
        raise TypeError(f"backend_name is a {type(backend_name).__name__}, expected a str")
    if backend_name not in (None, "hccl", "nccl", "mccl"):
        raise RuntimeError(f"backend_name is {backend_name!r}, expected 'hccl', 'nccl' or 'mccl'")
    groups.init()


def release() -> None:
    """Leaves all groups; `init` may be called again."""
    dist.destroy_process_group()


def get_comm_name(group: str = WORLD) -> str:
    """Returns the name by which the group's ranks know their communicator; the first call of a group is collective."""
    return enter(group).domain


def get_group_size(group: str = WORLD) -> int:
    """Returns the number of ranks in the group."""
    return len(dist.get_process_group_ranks(group))


def get_local_rank(group: str = WORLD) -> int:
    """Returns this process's rank among the group's ranks on its host."""
    return _beside(group).index(launch.detect().rank)


def get_local_rank_size(group: str = WORLD) -> int:
    """Returns the number of the group's ranks on this host."""
    return len(_beside(group))


def _beside(group: str) -> list[int]:
    """Returns the group's ranks on this host, on which launchers put ranks that follow each other."""
    job, ranks = launch.detect(), dist.get_process_group_ranks(group)
    if job.rank not in ranks:
        raise InvalidParamError(
            f"group is {group!r}, expected one of this rank, {job.rank}; its ranks are {ranks}", id=1321
        )
    first = job.rank - job.local_rank if job.local_size else 0
    return [rank for rank in ranks if first <= rank < first + (job.local_size or job.size)]


def get_world_rank_from_group_rank(group: str, group_rank_id: int) -> int:
    """Converts a rank of the group to a rank of the job."""
    return dist.get_global_rank(group, group_rank_id)


def get_group_rank_from_world_rank(world_rank_id: int, group: str) -> int:
    """Converts a rank of the job to a rank of the group."""
    return dist.get_group_rank(group, world_rank_id)


def get_rank(group: str = WORLD) -> int:
    """Returns this process's rank in the group."""
    return dist.get_process_group_ranks(group).index(launch.detect().rank)


def create_group(group: str, rank_ids: list[int], options: Any = None) -> None:
    """Gives the group of these ranks a name. Does not communicate. ``options``, of HCCL, is checked and ignored."""
    if options is not None and not isinstance(options, GroupOptions):
        raise TypeError(f"the argument 'options' must be type of GroupOptions, but got {type(options)}.")
    if not isinstance(group, str):
        raise TypeError(f"the argument 'group' must be type of string, but got 'group' type : {type(group)}.")
    if not isinstance(rank_ids, list):
        raise TypeError(f"the argument 'rank_ids' must be type of list, but got 'rank_ids' type : {type(rank_ids)}.")
    groups.new_group(rank_ids, name=group)


def destroy_group(group: str) -> None:
    """Removes a group that `create_group` has named."""
    if group in groups.WORLD:
        raise ValueError("The world_group does not support destruction.")
    dist.destroy_process_group(group)


def _checks(operator: str, group: str | None) -> guard:
    """Surrounds what is checked and made before an operator, whose own checks follow; see `guard`."""
    return guard(enter(group), operator, TypeError)


def _like(tensor: Any) -> Tensor:
    check_tensor("tensor", tensor)
    return empty(tuple(tensor.shape), tensor.dtype)


def _copy(tensor: Any) -> Tensor:
    output = _like(tensor)
    assign("output", output, tensor)
    return output


def _rows(tensor: Tensor, rows: int) -> Tensor:
    return empty((rows, *tensor.shape[1:]), tensor.dtype)


def _length(tensor: Any) -> int:
    check_tensor("tensor", tensor)
    return rows_of(tensor.shape, "tensor")


def _share(tensor: Any, group: str) -> int:
    rows, size = _length(tensor), enter(group).size
    if rows % size or not rows:
        raise InvalidParamError(
            f"tensor has shape {tensor.shape}, expected dimension 0 to be a multiple of {size}", id=1322
        )
    return rows // size


def _shape(argument: Any) -> tuple[int, ...]:
    shape = tuple(argument.shape if isinstance(argument, Tensor) else argument)
    if not all(isinstance(n, int) for n in shape) or math.prod(shape) < 0:
        raise TypeError(f"Expected tensor or tuple, but got {argument!r}")
    return shape
