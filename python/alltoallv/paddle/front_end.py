"""Paddle's groups, tensors, gradients and tasks; `alltoallv.paddle` describes what all its functions share."""

from __future__ import annotations

import datetime
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.distributed import ReduceOp
from paddle.distributed.communication.group import Group as PaddleGroup
from paddle.distributed.communication.group import is_initialized as paddle_is_initialized

from alltoallv import _core, communicator, memory
from alltoallv._calls import subgroups
from alltoallv._calls.adapters import Adapter, Region, check_untracked
from alltoallv._calls.collectives import Map
from alltoallv._calls.counts import Counts, share_of
from alltoallv._calls.exchanges import ExpertRows
from alltoallv._calls.guard import Ended, Handle, Member, Pending
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError, InvalidTensorError
from alltoallv.launch import detect as launch
from alltoallv.quantization.requests import ErrorFeedback

__all__ = ["is_initialized", "new_group", "wait"]


class Task(Handle):
    """An operator under way or done, with the methods of Paddle's task.

    The tensors that it uses stay alive until it is done, even if the handle is dropped.
    """

    def __init__(self, communicator: Member, core: Pending, keep: tuple[Any, ...], finish: Callable[[], Any]) -> None:
        self.communicator: Member = communicator
        super().__init__(communicator, core, keep, finish)

    def is_sync(self) -> bool:
        """True if the call had ended when it returned this handle."""
        return False

    def synchronize(self) -> None:
        """Waits like `wait`: the memory is the host's."""
        self.wait()

    def _seconds(self, timeout: Any) -> float | None:
        """Converts Paddle's timedelta, in which 0, its default, means no limit."""
        if isinstance(timeout, datetime.timedelta):
            return timeout.total_seconds() or None
        return super()._seconds(timeout)


class Done(Ended, Task):
    """The handle of a call with ``sync_op=True``."""

    def is_sync(self) -> bool:
        """Returns True."""
        return True


_NAMES: dict[Any, str] = {
    dtype: name for name in _core.dtypes if isinstance(dtype := getattr(paddle, name, None), paddle.dtype)
}


def core_name(dtype: Any) -> str:
    """Returns the core's name of a dtype; raises if it has none."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise InvalidTensorError(
            f"dtype is {dtype}, expected one of {', '.join(_NAMES.values())}", 13, id=2092
        ) from None


def check_tensor(name: str, x: object) -> None:
    """Refuses everything but dense tensors in host memory that hold values."""
    if not paddle.in_dynamic_mode():
        raise BackendUnavailableError(
            "alltoallv.paddle is only supported in dygraph mode: call paddle.disable_static() first, and use "
            "paddle.jit.to_static with full_graph=False",
            id=5070,
        )
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a paddle.Tensor")
    if not x.is_dense():
        raise InvalidTensorError(f"{name} is a sparse tensor, expected a dense one", 7, id=2101)
    if not x.place.is_cpu_place():
        raise BackendUnavailableError(
            f"{name} lies on {x.place}, which this release does not serve for Paddle tensors: "
            "use paddle.set_device('cpu')",
            id=5047,
        )


def region(tensor: Tensor) -> Region:
    """Returns the address and size of a contiguous tensor."""
    return (tensor.data_ptr(), tensor.size * tensor.element_size()) if tensor.size else (0, 0)


def from_block(block: _core.Block, shape: Sequence[int], dtype: Any) -> Tensor:
    """Returns a tensor of that shape over a block, which lives as long as the tensor and its views."""
    if math.prod(shape) == 0:
        return paddle.empty(list(shape), dtype)
    # DLPack carries bytes, which Paddle then reads as any dtype: NumPy has no bfloat16 to hand over.
    array = memory.from_block(block, (math.prod(shape) * _itemsize(dtype),), np.dtype(np.uint8))
    return paddle.utils.dlpack.from_dlpack(array).view(dtype).view(list(shape))


def empty(shape: int | Sequence[int], dtype: Any = None) -> Tensor:
    """Returns a new, uninitialized CPU tensor in this process's shared arena; see `alltoallv.empty`.

    ``dtype`` is a ``paddle.dtype`` or its name; the default is Paddle's.
    """
    return allocate((shape,) if isinstance(shape, int) else tuple(shape), dtype or paddle.get_default_dtype())


def allocate(shape: Sequence[int], dtype: Any) -> Tensor:
    """Returns a new tensor like `empty`."""
    if isinstance(dtype, str):
        dtype = getattr(paddle, dtype)
    return from_block(_core.allocate(math.prod(shape) * _itemsize(dtype)), shape, dtype)


def _itemsize(dtype: Any) -> int:
    return _core.dtypes[core_name(dtype)].size


class _Tensors(Adapter[Tensor]):
    kind, tensor, feedback, handle = "a Paddle tensor", Tensor, ErrorFeedback, Task
    done, tracks_writes = Done, True

    def contiguous(self, x: Tensor) -> Tensor:
        return x if x.stop_gradient and x.is_contiguous() else x.detach().contiguous()

    def address(self, x: Tensor) -> int:
        return x.data_ptr()

    check, name, region = staticmethod(check_tensor), staticmethod(core_name), staticmethod(region)

    def allocate(self, shape: Sequence[int], dtype: str, like: Tensor) -> Tensor:
        return allocate(shape, dtype)

    def from_block(self, block: _core.Block, shape: Sequence[int], like: Tensor) -> Tensor:
        return from_block(block, shape, like.dtype)

    def writes(self, x: Tensor) -> None:
        x._bump_inplace_version()  # a backward pass that needs the old values then raises an error

    def values(self, x: Tensor) -> Any:
        return x.astype("float32").numpy()


ADAPTER = _Tensors()


Group = Any  # paddle's Group | Communicator | None

_TIMEOUT = 600.0  # seconds, as everywhere
_BACKENDS = ("gloo", "nccl", "bkcl", "xccl", "flagcx", "heter")
_numbers = itertools.count()
_made: weakref.WeakKeyDictionary[Any, Communicator] = weakref.WeakKeyDictionary()
_timeouts: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()


def new_group(
    ranks: Sequence[int] | None = None,
    backend: str | None = None,
    timeout: datetime.timedelta | float = _TIMEOUT,
    nccl_comm_init_option: int = 0,
    nccl_config: Any = None,
) -> PaddleGroup:
    """Returns the group of these ranks, where ``paddle.distributed.new_group`` cannot make one. Does not communicate.

    All ranks of the job make their groups in the same order, members or not, as in Paddle.

    Args:
        ranks: Different ranks of the job; sorted, a rank's index among them is its rank in the group. None means all.
        backend: A name that Paddle knows, or None: host memory carries the group in any case.
        timeout: How long a rank waits for its peers, here and in every operator: a timedelta or seconds.
        nccl_comm_init_option, nccl_config: Ignored: they are NCCL's.

    Raises:
        InvalidParamError: ranks are out of range or repeated, Paddle has no such backend, or the timeout is below 0.
    """
    check_backend(backend)
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise InvalidParamError(f"timeout is {timeout!r}, expected a timedelta or seconds above 0", id=1413)
    job = launch.detect()
    members = subgroups.check_ranks(range(job.size) if ranks is None else ranks, job.size)
    number = next(_numbers)
    rank = members.index(job.rank) if job.rank in members else -1
    group = PaddleGroup(rank, -1 - number, members, name=f"alltoallv_{number}")
    _timeouts[group] = float(seconds)
    return group


def check_backend(backend: str | None) -> None:
    """Refuses a name that Paddle does not know."""
    if backend is not None and backend not in _BACKENDS:
        raise InvalidParamError(f"backend is {backend!r}, expected None or one of {', '.join(_BACKENDS)}", id=1412)


def is_initialized() -> bool:
    """Returns True once this process has joined its job: by ``init_parallel_env`` or its first call for all ranks."""
    return bool(paddle_is_initialized() or communicator.defaults)


def wait(tensor: Tensor, group: Group = None, use_calc_stream: bool = True) -> None:
    """Waits for the asynchronous calls that this process has made on ``group``, with ``use_calc_stream=False``.

    With ``use_calc_stream=True`` there is nothing to wait for: what Paddle computes on CPU is done when a call returns.

    Args:
        tensor: Ignored, as by Paddle, whose streams are waited for as a whole.
        group: A Paddle group, a `Communicator`, or None for all ranks; a rank outside of it returns at once.

    Raises:
        AllToAllVError: what such a call raises.
    """
    comm = resolve(group)
    if comm is not None and not use_calc_stream:
        for task in list(communicator.pending):
            if isinstance(task, Task) and task.communicator is comm:
                task.wait()


def resolve(group: Group) -> Communicator | None:
    """Returns the communicator of ``group``. The first call makes it, which is collective among its ranks.

    One that a loss, a timeout or an abort has ended stays, so that calls raise at once; another group makes another.
    A rank that is not a member of the group gets None and a warning.
    """
    if isinstance(group, Communicator):
        return subgroups.of_host(group)
    if group is None:
        return communicator.default()
    if not isinstance(group, PaddleGroup):
        raise InvalidParamError(
            f"group is a {type(group).__name__}, expected a Paddle group, a Communicator or None", id=1414
        )
    if group.id == 0:  # Paddle's number for all ranks
        return communicator.default()
    comm = _made.get(group)
    if comm is not None:
        return comm
    rank = launch.detect().rank
    if rank not in group.ranks:
        warnings.warn(f"Current global rank {rank} is not in group {group.name}", stacklevel=3)
        return None
    # Groups of the same ranks differ in Paddle's group number, which is equal on all of them.
    domain = f"paddle-{group.id}-{subgroups.digest(group.ranks)}"
    comm = _made[group] = subgroups.connect(
        str(group.name), domain, sorted(group.ranks), _timeouts.get(group, _TIMEOUT)
    )
    return comm


def rank_in(group: Group, rank: Any, name: str) -> Any:
    """Converts the argument ``name`` from a rank of the job to one of the group, as it is with a `Communicator`."""
    if not isinstance(group, PaddleGroup):
        return rank
    return subgroups.place_of(rank, group.ranks, name)


_OPS = {getattr(ReduceOp, name): name.lower() for name in ("SUM", "AVG", "MIN", "MAX", "PROD")}


def rows_of_ranks(name: str, x: Tensor, size: int) -> list[Tensor]:
    """Returns ``size`` equal parts of the argument ``name`` along dimension 0, in its memory."""
    ADAPTER.check(name, x)
    rows = share_of(name, x.shape, size)
    return [x[rows * j : rows * (j + 1)] for j in range(size)]


class _Applied(PyLayer):
    """Fills its context only after the call has succeeded: Paddle never frees a context whose forward has raised."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, call: Map[Tensor]) -> Tensor:
        output = call.run(input)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.call.back(grad, apply)


def apply(input: Tensor, call: Map[Tensor]) -> Tensor:
    """Runs the call and records its gradient."""
    return _Applied.apply(input, call)


def wants_gradient(x: Tensor | None) -> bool:
    """Returns whether autograd records what is computed from the tensor."""
    return x is not None and paddle.is_grad_enabled() and not x.stop_gradient


class _FrontEnd(ExpertRows[Tensor, Group, Task]):
    adapter = ADAPTER
    enter, rank_in, apply = staticmethod(resolve), staticmethod(rank_in), staticmethod(apply)
    numbers = staticmethod(paddle.to_tensor)

    def ended(self, result: Any) -> Task:
        return Done(result)

    def reduction(self, op: Any) -> str:
        if type(op) is not int or op not in _OPS:
            raise InvalidParamError(f"op is {op!r}, expected a paddle.distributed.ReduceOp", id=1411)
        return _OPS[op]

    def prepare(
        self, comm: Communicator, operator: str, outputs: Any, inputs: Any, terms: dict[str, Any], gradient: Any
    ) -> Any:
        """Divides one tensor to scatter; fills an empty list of outputs with tensors of the shapes of the inputs."""
        if operator == "scatter" and isinstance(inputs, Tensor) and comm.rank == terms["root"]:
            inputs = rows_of_ranks(terms["names"][1], inputs, comm.size)
        if operator == "all_to_all" and len(ADAPTER.listed(terms["names"][1], inputs)) == 0:
            raise RuntimeError("The input tensor_list should not be empty.")
        if not isinstance(outputs, list) or outputs or (operator == "gather" and comm.rank != terms["root"]):
            return super().prepare(comm, operator, outputs, inputs, terms, gradient)
        likes = inputs if operator == "all_to_all" else [inputs] * comm.size
        fresh = [paddle.empty_like(x) for x in likes]
        call = super().prepare(comm, operator, fresh, inputs, terms, gradient)
        outputs.extend(fresh)
        return call

    def tracks(self, *tensors: Tensor) -> bool:
        """True if an input alone needs a gradient; a call with an output has none, as in Paddle."""
        return len(tensors) == 1 and wants_gradient(tensors[0])

    def check_tracked_output(self) -> None:
        check_untracked(True, "out")

    def taken(self, x: Tensor, index: npt.NDArray[np.int64]) -> Tensor:
        return paddle.gather(x.reshape([-1]), paddle.to_tensor(index))

    def check_counts(self, counts: dict[str, Counts]) -> None:
        for name, values in counts.items():
            if isinstance(values, Tensor) and values.dtype != paddle.int64:
                raise InvalidTensorError(
                    f"Please use int64 type in {name}, which has dtype {values.dtype}.", 13, id=2098
                )


front_end = _FrontEnd()
