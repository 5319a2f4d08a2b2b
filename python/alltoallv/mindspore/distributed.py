"""Every public name of ``mindspore.mint.distributed``, on CPU, with its signatures, return values and error classes.

    from alltoallv.mindspore import distributed as dist

    dist.init_process_group()
    dist.all_reduce(tensor)

`alltoallv.mindspore.install` puts them into MindSpore itself, for programs that must not be changed. Differences:

- All ranks of a group raise an error that one of them finds in its arguments, instead of waiting for that rank.
- ``group`` may also be an `alltoallv.Communicator`; ``src``, ``dst`` and ``peer`` are then ranks in it.
- ``scatter_list`` and ``gather_list`` may be None except on the root, where MindSpore demands them of all ranks.
- all_reduce, broadcast, reduce_scatter and the functions of names with all_gather and all_to_all have gradients,
  as `alltoallv.mindspore` describes. The others have none, as MindSpore's.

Outputs are contiguous tensors. Asynchronous calls return a `CommHandle`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

from mindspore import Tensor, log
from mindspore._c_expression import GroupOptions
from mindspore.mint.distributed._utils import _parse_tcp_url_for_ipv4
from mindspore.mint.distributed.distributed import TCPStore

from alltoallv import _core
from alltoallv._calls import messages as calls
from alltoallv._calls.front_end import publish as _publish
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import AllToAllVError, InvalidParamError
from alltoallv.launch import detect as launch
from alltoallv.launch.detect import BY_ADDRESS
from alltoallv.mindspore import collectives, exchange, messages
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.front_end import check_async, enter, front_end
from alltoallv.mindspore.group import Group, on_host
from alltoallv.mindspore.tensors import CommHandle, executor

__all__ = [
    "P2POp",
    "TCPStore",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_into_tensor_uneven",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "gather_object",
    "get_backend",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "new_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_uneven",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
]


P = ParamSpec("P")
R = TypeVar("R")

OPS = ("sum", "prod", "min", "max", "avg")
_TENSORS = {"tensor": "input", "input": "input", "input_tensor": "input", "output": "output", "output_tensor": "output"}
# Lists of one tensor per rank; this rank's entry must match the other tensor.
_LISTS = {"tensor_list": "tensor", "input_list": "output", "scatter_list": "tensor", "gather_list": "tensor"}
_ROOTS = {"scatter_list": "src", "gather_list": "dst"}  # lists that only one rank passes


def as_mint(function: Callable[P, R], ops: tuple[str, ...] = OPS, *, message: bool = False) -> Callable[P, R]:
    """Adds MindSpore's checks before the function's own; all ranks raise an error that one of them finds.

    A parameter's name determines its checks. A TypeError concerns this rank alone, as in MindSpore, and errors of a
    message only its two ranks.
    """
    parameters = inspect.signature(function).parameters
    operator = function.__name__.removesuffix("_uneven")  # the core's name
    operator = "reduce_scatter" if operator == "reduce_scatter_tensor" else operator
    lists, gathers = [name for name in _LISTS if name in parameters], "output_tensor" in parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = {**defaults, **dict(zip(parameters, args, strict=False)), **kwargs}
        comm = None
        try:
            _check_values(function.__name__, arguments, ops)
            if message:
                name = "dst" if "dst" in arguments else "src"
                check_other(function.__name__, name, arguments[name], arguments["group"])
            if lists or gathers:
                comm = enter(arguments.get("group"))
                for name in lists:
                    _check_list(name, arguments, comm)
                if gathers:
                    _check_gathered(arguments["output_tensor"], arguments["input_tensor"], comm)
        except Exception as error:
            if message or isinstance(error, TypeError):
                raise
            with guard(comm or enter(arguments.get("group")), operator):
                raise error
        return function(*args, **kwargs)

    return call


def check_other(operator: str, name: str, peer: int, group: Group) -> int:
    """Returns the group's number of ``peer``; refuses a message from this rank to itself."""
    rank = groups.rank_in(group, peer, name)
    if rank == enter(group).rank:
        raise InvalidParamError(f"For {operator}, {name} is {peer}, this rank itself, expected another one", id=1341)
    return rank


def _check_values(operator: str, arguments: dict[str, Any], ops: tuple[str, ...]) -> None:
    for name, value in arguments.items():
        if value is inspect.Parameter.empty:
            continue  # the function itself reports what is missing
        if name in _TENSORS and not isinstance(value, Tensor):
            raise TypeError(f"For {operator}, the {_TENSORS[name]} tensor must be tensor, but got {type(value)}")
        if name == "op" and not isinstance(value, str):
            raise TypeError(f"For {operator}, the input op type must be str, but got {type(value)}")
        if name == "op" and value not in ops:
            raise TypeError(f"For {operator}, the input op value must be one of {', '.join(ops)}, but got {value!r}")
        if name == "async_op":
            check_async(value)


def _check_list(name: str, arguments: dict[str, Any], comm: Communicator) -> None:
    tensors, own = arguments[name], arguments[_LISTS[name]]
    rooted = name in _ROOTS
    at_root = not rooted or _rank_in(arguments, _ROOTS[name]) == comm.rank
    if tensors is None and not at_root:
        return
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"Expected list or tuple, but got {type(tensors)}.")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"Expected tensor, but got {type(tensor)}")
    if len({str(tensor.dtype) for tensor in tensors}) > 1:
        raise TypeError(f"{name} has dtypes {[str(x.dtype) for x in tensors]}, expected one dtype")
    if rooted and len({tensor.shape for tensor in tensors}) > 1:
        raise TypeError(f"{name} has shapes {[x.shape for x in tensors]}, expected one shape")
    if not at_root:
        return
    if len(tensors) != comm.size:
        raise TypeError(f"The argument list tensor len must be equal to group rank size, but got {len(tensors)}.")
    entry = tensors[comm.rank]
    if (entry.dtype, entry.shape) != (own.dtype, own.shape):
        expected = f"{own.dtype} and {own.shape}, as {_LISTS[name]} has"
        raise TypeError(f"{name}[{comm.rank}] has dtype {entry.dtype} and shape {entry.shape}, expected {expected}")


def _check_gathered(output: Tensor, input: Tensor, comm: Communicator) -> None:
    expected = (comm.size * input.shape[0], *input.shape[1:]) if input.ndim else (comm.size,)
    _core.check_shape("output_tensor", output.shape, expected)


def first_outputs(function: Callable[P, R]) -> Callable[P, R]:
    """Makes an all_to_all ignore outputs beyond one per rank, as MindSpore's does."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        outputs, group = arguments["output_tensor_list"], arguments.get("group")
        if isinstance(outputs, list | tuple):
            arguments["output_tensor_list"] = outputs[: enter(group).size]
        return cast("Callable[..., R]", function)(**arguments)

    return call


def _rank_in(arguments: dict[str, Any], name: str) -> int:
    try:
        return groups.rank_in(arguments["group"], arguments[name], name)
    except ValueError:
        return -1  # the function itself refuses it


# The job and its groups.


_VARIABLES = ("ALLTOALLV_RANK", "ALLTOALLV_WORLD_SIZE", "ALLTOALLV_JOB_ID")
_set_here: list[str] = []


def init_process_group(
    backend: str = "hccl",
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: TCPStore | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: int | None = None,
) -> None:
    """Joins all ranks of the job; collective. It works on CPU as on Ascend; MindSpore's own works on Ascend alone.

    Args:
        backend: ``"hccl"``, MindSpore's only backend; on CPU the ranks use shared memory all the same.
        init_method: ``"tcp://ip:port"``, equal on all ranks, instead of a launcher; then ``rank`` and ``world_size``
            are needed. All ranks must be on this host.
        timeout: Time that a rank waits for its peers, here and in every collective; default: 600 s. Once this process
            has joined, it changes nothing.
        world_size: With a launcher, the launcher's number or -1.
        rank: With a launcher ignored, as in MindSpore.
        store: A `TCPStore`, whose address replaces ``init_method``.
        group_name, pg_options, device_id: Accepted for compatibility with MindSpore and ignored.

    Raises:
        TypeError: an argument has another type.
        ValueError: another backend, both ``init_method`` and ``store``, an impossible rank or world size.
        RuntimeError: ``init_method`` has another form.
        CommTimeoutError: ranks did not come; the message names them.
    """
    optional = ("init_method", init_method, str), ("timeout", timeout, timedelta), ("store", store, TCPStore)
    for name, value, kind in optional:
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} is a {type(value).__name__}, expected a {kind.__name__}")
    for name, number in (("world_size", world_size), ("rank", rank)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{name} is a {type(number).__name__}, expected an int")
    if not isinstance(group_name, str):
        raise TypeError(f"group_name is a {type(group_name).__name__}, expected a str")
    if backend != "hccl":
        raise ValueError(f"Only support hccl now, please setting backend to hccl, but got {backend!r}")
    if init_method is not None and store is not None:
        raise ValueError("Only one of init_method and store is supported.")
    seconds = 600.0 if timeout is None else timeout.total_seconds()
    if init_method is not None or store is not None:
        _meet_without_launcher(init_method, store, rank, world_size)
    comm = groups.init(timeout=seconds)
    if world_size not in (-1, comm.size):
        raise ValueError(f"world_size is {world_size}, expected -1 or {comm.size}, the number of ranks")


def _meet_without_launcher(init_method: str | None, store: TCPStore | None, rank: int, world_size: int) -> None:
    """Sets the environment variables that our own launcher would set."""
    if world_size <= 0:
        raise ValueError(f"world_size is {world_size}, expected a positive integer with init_method or store")
    if rank < 0:
        raise ValueError(f"rank is {rank}, expected a non-negative integer with init_method or store")
    if store is not None:
        address = f"{store.host}:{store.port}"
    else:
        try:
            address = "{}:{}".format(*_parse_tcp_url_for_ipv4(init_method))
        except Exception as error:
            raise RuntimeError(f"Failed to parse TCP URL from 'init_method': {init_method}") from error
    os.environ.update(zip(_VARIABLES, (str(rank), str(world_size), f"{BY_ADDRESS}{address}"), strict=True))
    _set_here[:] = _VARIABLES


def destroy_process_group(group: str | None = None) -> None:
    """Leaves the group of that name; None means all groups, after which `init_process_group` may be called again."""
    _check_group(group, "destroy_group")
    executor.sync()
    if group is not None and group not in groups.WORLD:
        groups.forget(group)
        return
    groups.forget(None)
    while _set_here:
        os.environ.pop(_set_here.pop(), None)


def is_available() -> bool:
    """Returns True: this module needs nothing of MindSpore's own communication."""
    return True


def is_initialized() -> bool:
    """True if this process has joined its job and not left it."""
    return groups.joined()


def get_rank(group: str | None = None) -> int:
    """Returns this process's rank in the group; -1 if it is not a member, or has not joined the job."""
    return _of_member(group, "get_rank", lambda members, rank: members.index(rank))


def get_world_size(group: str | None = None) -> int:
    """Returns the number of ranks in the group; -1 if this process is not a member, or has not joined the job."""
    return _of_member(group, "get_world_size", lambda members, rank: len(members))


def _of_member(group: str | None, function: str, answer: Callable[[list[int], int], int]) -> int:
    _check_group(group, function)
    if not groups.joined():
        return -1
    try:
        members, rank = groups.members(group), groups.resolve(None).rank
    except InvalidParamError as error:
        log.warning(error)
        return -1
    return answer(members, rank) if rank in members else -1


def new_group(
    ranks: list[int] | None = None,
    timeout: Any = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> str:
    """Returns a name for the group of these ranks of the job, to be passed as ``group``. Does not communicate.

    Args:
        ranks: Different ranks of the job; sorted, a rank's index among them is its rank in the group. None means all.
        backend: ``"hccl"`` (None) or ``"mccl"``; becomes a part of the name. Both move host memory on CPU.
        pg_options: A MindSpore ``GroupOptions``; ignored, like ``timeout``, ``use_local_synchronization`` and
            ``group_desc``.

    Returns:
        The name; ``""`` if this rank is not among ``ranks``, as in MindSpore.

    Raises:
        TypeError: ``ranks`` is not a list, or ``backend`` or ``pg_options`` has another type.
        ValueError: ranks are out of range or repeated.
    """
    if ranks is not None and not isinstance(ranks, list):
        raise TypeError(f"ranks must be list, but got {type(ranks)}")
    if ranks is None:
        return groups.WORLD[0]
    if backend not in (None, "hccl", "mccl"):
        raise TypeError(f"the input backend must be hccl or mccl, but got {backend}")
    if pg_options is not None and not isinstance(pg_options, GroupOptions):
        raise TypeError(f"pg_options must be type GroupOptions, but got {type(pg_options)}")
    if len(set(ranks)) == len(ranks) and launch.detect().rank not in ranks:
        return ""
    return groups.new_group(ranks, prefix=backend or "hccl")


def get_backend(group: str | None = None) -> str:
    """Returns ``"hccl"`` or ``"mccl"``, as in the group's name: MindSpore's word, not what moves the data."""
    _check_group(group, "get_backend")
    return "mccl" if group is not None and "hccl" not in group and "mccl" in group else "hccl"


def get_global_rank(group: str | None, group_rank: int) -> int:
    """Converts the group's rank ``group_rank`` to a rank of the job."""
    if not isinstance(group_rank, int):
        raise TypeError(f"The group_rank argument must be integer, but got {type(group_rank)}.")
    members = get_process_group_ranks(group)
    return members[_core.checked_rank("group_rank", group_rank, len(members))]


def get_group_rank(group: str | None, global_rank: int) -> int:
    """Converts the job's rank ``global_rank`` to a rank of the group; raises KeyError if it is not a member, as
    MindSpore.
    """
    if not isinstance(global_rank, int):
        raise TypeError(f"The global_rank argument must be integer, but got {type(global_rank)}.")
    members = get_process_group_ranks(group)
    if global_rank not in members:
        raise KeyError(f"global_rank is {global_rank}, expected one of the group's ranks {members}")
    return members.index(global_rank)


def get_process_group_ranks(group: str | None = None) -> list[int]:
    """Returns the ranks of the job in the group, in the order of their ranks there."""
    _check_group(group, "get_process_group_ranks")
    return groups.members(group)


def _check_group(group: Any, function: str) -> None:
    if group is not None and not isinstance(group, str):
        raise TypeError(
            f"For '{function}', the argument 'group' must be type of string or None, "
            f"but got 'group' type : {type(group)}."
        )


# Messages between two ranks; ``dst`` and ``src`` are ranks of the job.


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


# Picklable objects instead of tensors. What arrives is unpickled, which can run any code that the sender chooses: the
# ranks must trust each other. ``src`` and ``dst`` are ranks of the job.


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Replaces entry j of ``object_list``, which has one per rank, by rank j's ``obj``."""

    def check(size: int, at_root: bool) -> None:
        _check_objects("object_list", object_list, size)

    object_list[:] = front_end.objects("all_gather", group, obj, check=check)


def broadcast_object_list(object_list: list[Any], src: int = 0, group: Group = None, device: Any = None) -> None:
    """Replaces the entries of ``object_list``, as many on all ranks, by rank ``src``'s. ``device`` is ignored."""

    def check(size: int, at_root: bool) -> None:
        _check_filled("object_list", object_list)

    object_list[:] = front_end.objects("broadcast", group, object_list, root=("src", src), check=check)


def gather_object(obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0, group: Group = None) -> None:
    """Replaces entry j of ``object_gather_list`` on rank ``dst``, which has one per rank, by rank j's ``obj``."""

    def check(size: int, at_root: bool) -> None:
        if at_root:
            _check_objects("object_gather_list", object_gather_list, size)

    arrived = front_end.objects("gather", group, obj, root=("dst", dst), check=check)
    if object_gather_list is not None and arrived is not None:
        object_gather_list[:] = arrived


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None,
    src: int = 0,
    group: Group = None,
) -> None:
    """Replaces entry 0 of rank j's output list by entry j of rank ``src``'s input list."""
    objects = scatter_object_input_list

    def check(size: int, at_root: bool) -> None:
        _check_filled("scatter_object_output_list", scatter_object_output_list)
        if at_root:
            _check_objects("scatter_object_input_list", objects, size)

    scatter_object_output_list[0] = front_end.objects("scatter", group, objects, root=("src", src), check=check)


def send_object_list(object_list: list[Any], dst: int, group: Group = None, device: Any = None) -> None:
    """Sends the entries of ``object_list`` to rank ``dst``, which calls `recv_object_list`. ``device`` is ignored."""
    comm, rank = _messaging("send_object_list", object_list, "dst", dst, group)
    calls.send(comm, object_list, rank)


def recv_object_list(object_list: list[Any], src: int = 0, group: Group = None, device: Any = None) -> int:
    """Fills ``object_list`` with what rank ``src`` sends, as many entries; returns 0. ``device`` is ignored."""
    comm, rank = _messaging("recv_object_list", object_list, "src", src, group)
    object_list[:] = calls.recv(comm, len(object_list), rank)
    return 0


def _messaging(operator: str, object_list: Any, name: str, peer: Any, group: Group) -> tuple[Communicator, int]:
    """Returns the communicator in host memory, where objects travel, and the other rank in it."""
    rank = check_other(operator, name, peer, group)
    if not isinstance(object_list, list):
        raise TypeError(f"For {operator}, the object_list must be a list, but got {type(object_list)}")
    return on_host(enter(group)), rank


def _check_objects(name: str, values: Any, size: int) -> None:
    if not isinstance(values, list) or len(values) != size:
        shown = f"{len(values)} entries" if isinstance(values, list) else f"a {type(values).__name__}"
        raise TypeError(f"The len of argument {name} must be equal to group rank size {size}, but got {shown}.")


def _check_filled(name: str, values: Any) -> None:
    if not isinstance(values, list) or not values:
        raise TypeError(f"The {name} can not be empty.")


all_gather = as_mint(collectives.all_gather)
all_gather_into_tensor = as_mint(exchange.all_gather_into_tensor)
all_gather_into_tensor_uneven = as_mint(collectives.all_gather_into_tensor_uneven)
all_reduce = as_mint(collectives.all_reduce)
all_to_all = as_mint(first_outputs(collectives.all_to_all))
all_to_all_single = as_mint(exchange.all_to_all_single)
barrier = as_mint(collectives.barrier)
broadcast = as_mint(collectives.broadcast)
gather = as_mint(collectives.gather)
reduce = as_mint(collectives.reduce)
reduce_scatter = as_mint(collectives.reduce_scatter)
reduce_scatter_tensor = as_mint(collectives.reduce_scatter_tensor)
reduce_scatter_tensor_uneven = as_mint(collectives.reduce_scatter_tensor_uneven, ("sum", "min", "max", "avg"))
scatter = as_mint(collectives.scatter)


_publish(globals())
