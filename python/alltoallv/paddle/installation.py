"""Puts this package under Paddle's own functions, so that a program for GPUs runs on CPU unchanged: the functions of
jobs, the methods of process groups, and the operators of MoE gates.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor
from paddle.base import core
from paddle.distributed import collective, fleet, parallel
from paddle.distributed.communication import group as collective_groups
from paddle.distributed.communication.group import _GroupManager
from paddle.distributed.models.moe import utils as gate_operators
from paddle.distributed.utils import moe_utils, nccl_utils

from alltoallv import communicator
from alltoallv._calls import messages as calls
from alltoallv._calls import subgroups
from alltoallv._calls.front_end import Replacements
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError, InvalidTensorError
from alltoallv.launch import detect as launch
from alltoallv.paddle import collectives, exchange, messages
from alltoallv.paddle.front_end import Done, Task, check_backend, check_tensor, region, resolve, wait

__all__ = ["install", "uninstall"]

_DEVICES = ("gpu", "npu", "xpu", "cuda")
_replaced = Replacements("paddle")


class install:
    """Puts this package's exchanges under Paddle's own functions, on CPU, until `uninstall` or the end of ``with``.

    - The process groups of ``init_parallel_env`` and ``new_group`` exchange through it. So does all that Paddle builds
      on them: every function of ``paddle.distributed`` and ``paddle.distributed.stream`` in dygraph mode, ``fleet``'s
      groups, and ``paddle.incubate``'s ``MoELayer``. Paddle itself checks their arguments. What Paddle does in C++
      alone, as ``paddle.DataParallel``'s sums, stays its gloo's.
    - ``global_scatter`` and ``global_gather``, wherever Paddle has imported them, and the operators of MoE gates, which
      Paddle has on GPUs only: number_count, assign_pos, random_routing, limit_by_capacity, prune_gate_by_capacity.
    - ``init_parallel_env``, ``fleet.init`` and ``ParallelEnv`` under every launcher of this package, and with every
      backend's name, as ``new_group``; ``wait``, which Paddle lacks on CPU.
    - ``paddle.set_device``, in which "gpu", "npu" and "xpu" mean CPU.

    Names that a module of the program has imported before with ``from ... import ...`` stay Paddle's: install first. A
    second call changes nothing.

    Raises:
        BackendUnavailableError: Paddle computes on another device than the CPU.
    """

    def __init__(self) -> None:
        if _replaced:
            return
        if not paddle.get_device().startswith("cpu"):
            raise BackendUnavailableError(
                f"Paddle computes on {paddle.get_device()}, expected the CPU: call paddle.set_device('cpu') first",
                id=5045,
            )
        for name, method in vars(Methods).items():
            if callable(method):
                _replaced.replace(core.ProcessGroup, name, method)
        pairs = [
            *((getattr(moe_utils, name), getattr(exchange, name)) for name in ("global_scatter", "global_gather")),
            *((getattr(gate_operators, gate.__name__), gate) for gate in _GATES),
            (collective_groups.wait, wait),
            (nccl_utils.check_nccl_version_for_p2p, _check_nothing),
            (parallel.init_parallel_env, _launched(parallel.init_parallel_env)),
            (paddle.set_device, _on_cpu(paddle.set_device)),
            (collective.new_group, _checked(collective.new_group)),
        ]
        _replaced.everywhere(pairs)
        _replaced.replace(collective, "_new_process_group_impl", _process_groups(collective._new_process_group_impl))
        of_group = collective_groups.Group
        _replaced.replace(of_group, "get_group_rank", _rank_in_group(of_group.get_group_rank))
        _replaced.replace(core, "EagerReducer", _reducer(core.EagerReducer))
        _replaced.replace(parallel.ParallelEnv, "__init__", _launched(parallel.ParallelEnv.__init__))
        for owner in (fleet, fleet.fleet):
            _replaced.replace(owner, "init", _launched(owner.init))

    def __enter__(self) -> install:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        uninstall()


def uninstall() -> None:
    """Puts Paddle's own functions back; does nothing if `install` has not been called."""
    _replaced.undo()


def _check_nothing() -> None:
    """There is no NCCL on CPU whose version could be too old."""


def _on_cpu(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Paddle's ``set_device`` so that other devices mean the CPU."""

    @functools.wraps(theirs)
    def set_device(device: Any) -> Any:
        return theirs("cpu" if isinstance(device, str) and device.partition(":")[0] in _DEVICES else device)

    return set_device


def _checked(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Paddle's ``new_group``, which takes ranks that are not there."""

    @functools.wraps(theirs)
    def new_group(ranks: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        check_backend(backend)
        if ranks is not None:
            subgroups.check_ranks(ranks, launch.detect().size)
        return theirs(ranks, backend, *args, **kwargs)

    return new_group


def _rank_in_group(theirs: Callable[..., int]) -> Callable[..., int]:
    """Wraps what finds ranks in a group for Paddle's functions: its error does not name what is not in which list."""

    @functools.wraps(theirs)
    def get_group_rank(self: Any, rank: int) -> int:
        if self.is_member():
            subgroups.place_of(rank, self.ranks, "rank")
        return theirs(self, rank)

    return get_group_rank


def _process_groups(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps what makes a process group, so that every backend's name means host memory.

    That of all ranks is Paddle's gloo, which also serves Paddle's C++. Others are ours: Paddle 3.3's gloo finds peers
    by their ranks in a group alone, so that two groups take each other's addresses, and hang.
    """

    @functools.wraps(theirs)
    def make(backend: str, store: Any, rank: int, world_size: int, *args: Any, **kwargs: Any) -> Any:
        if backend in collective._valid_backend_list and kwargs.get("group_id"):
            return ProcessGroup(rank, world_size)
        return theirs("gloo", store, rank, world_size, *args, **kwargs)

    return make


def _reducer(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``paddle.DataParallel``'s reducer, which sums in C++ over a process group of Paddle's own."""

    @functools.wraps(theirs, updated=())
    def make(*args: Any) -> Any:
        world = collective._get_default_group()
        for each in args:
            if isinstance(each, ProcessGroup) and each.size() < world.nranks:
                raise BackendUnavailableError(
                    f"group has {each.size()} of {world.nranks} ranks, expected all for paddle.DataParallel on CPU: "
                    "use paddle.distributed.all_reduce on the gradients",
                    id=5046,
                )
        return theirs(*(world.process_group if isinstance(each, ProcessGroup) else each for each in args))

    return make


def _launched(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that reads the variables of ``paddle.distributed.launch``: they hold what any launcher sets."""

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _variables():
            return theirs(*args, **kwargs)

    return call


@contextlib.contextmanager
def _variables() -> Iterator[None]:
    """Sets Paddle's variables meanwhile: afterwards they would be a launcher's that contradicts the one there is."""
    job = launch.detect()
    values = {"PADDLE_DISTRI_BACKEND": "gloo"}
    if job.launcher != "paddle" and job.size > 1:
        endpoints = _endpoints()
        address, _, port = endpoints[0].rpartition(":")
        values |= {
            "PADDLE_TRAINER_ID": str(job.rank),
            "PADDLE_TRAINERS_NUM": str(job.size),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[job.rank],
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
        }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@functools.cache
def _endpoints() -> list[str]:
    """Returns an address of every rank, the first for Paddle's store; collective at the first call."""
    job = launch.detect()
    host = "127.0.0.1" if not job.several_hosts else socket.gethostbyname(socket.gethostname())
    with socket.socket() as free:
        free.bind((host, 0))
        endpoint = f"{host}:{free.getsockname()[1]}"
    comm = communicator.default()
    gathered: list[str] = calls.all_gather(comm, endpoint)(-1.0)
    return gathered


# The methods of Paddle's process groups, which all of Paddle's communication ends in, by this package's exchanges. What
# they take stands in Paddle's C++, in its order: outputs first, but for the old forms without ``sync_op``. Ranks are
# ranks in the group. Calls without ``sync_op``, and with ``sync_op=False``, return at once; those ``_on_calc_stream``
# when they are done.


_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _communicator(process_group: Any) -> Communicator:
    """Returns the communicator of the group that has this process group."""
    group = _groups.get(process_group)
    if group is None:
        for group in _GroupManager.group_map_by_id.values():
            if group.process_group is process_group:
                _groups[process_group] = group
                break
        else:
            raise InvalidParamError(
                "the process group belongs to no group of paddle.distributed, expected one that init_parallel_env or "
                "new_group has made and destroy_process_group has not ended",
                id=1417,
            )
    member = resolve(group)
    assert member is not None  # a rank outside a group has no process group
    return member


def _apart(inputs: Sequence[Tensor], *outputs: Tensor) -> list[Tensor]:
    """Returns the inputs, copies of those that share memory with an output: Paddle sends lists from a copy."""
    taken = [(at, at + size) for at, size in map(region, outputs)]

    def shares(x: Tensor) -> bool:
        at, size = region(x)
        return any(at < end and begin < at + size for begin, end in taken)

    return [x.clone() if shares(x) else x for x in inputs]


def _part(x: Tensor, number: int, index: int) -> Tensor:
    """Returns part ``index`` of ``number`` equal parts of the elements of a tensor, in its memory."""
    size = x.size // number
    return x.reshape([-1])[size * index : size * (index + 1)]


class Methods:
    """What `install` gives ``core.ProcessGroup``; see the module."""

    def all_gather(self, out: Any, x: Any, sync_op: bool | None = None) -> Task | None:
        """Gathers into a list; without ``sync_op`` the first argument is the input, the second one tensor."""
        if sync_op is None:
            return collectives.all_gather(x, out, _communicator(self), sync_op=False)
        (x,) = _apart([x], *out)
        return collectives.all_gather(out, x, _communicator(self), sync_op)

    def all_gather_on_calc_stream(self, out: list[Tensor], x: Tensor) -> Task | None:
        return Methods.all_gather(self, out, x, True)

    def all_gather_into_tensor(self, out: Tensor, x: Tensor, sync_op: bool) -> Task | None:
        return collectives.all_gather(out, x, _communicator(self), sync_op)

    def all_gather_into_tensor_on_calc_stream(self, out: Tensor, x: Tensor) -> Task | None:
        return collectives.all_gather(out, x, _communicator(self))

    def all_gather_partial(self, out: Tensor, x: Tensor, num: int, id: int) -> Task | None:
        """Gathers part ``id`` of ``num`` of every rank's tensor, which may be the output itself."""
        return collectives.all_gather(out, _part(x, num, id).clone(), _communicator(self))

    all_gather_partial_on_calc_stream = all_gather_partial

    def all_reduce(self, tensor: Tensor, op: Any, sync_op: bool) -> Task | None:
        return collectives.all_reduce(tensor, int(op), _communicator(self), sync_op)

    def all_reduce_on_calc_stream(self, tensor: Tensor, op: Any = 0) -> Task | None:
        return collectives.all_reduce(tensor, int(op), _communicator(self))

    def allreduce(self, tensor: Tensor, op: Any = 0) -> Task | None:
        return collectives.all_reduce(tensor, int(op), _communicator(self), sync_op=False)

    def all_to_all(self, out: list[Tensor], x: Sequence[Tensor], sync_op: bool) -> Task | None:
        return exchange.alltoall(out, _apart(x, *out), _communicator(self), sync_op)

    def all_to_all_on_calc_stream(self, out: list[Tensor], x: Sequence[Tensor]) -> Task | None:
        return Methods.all_to_all(self, out, x, True)

    def all_to_all_tensor(self, out: Tensor, x: Tensor, sync_op: bool) -> Task | None:
        return exchange.alltoall(out, x, _communicator(self), sync_op)

    def all_to_all_tensor_on_calc_stream(self, out: Tensor, x: Tensor) -> Task | None:
        return Methods.all_to_all_tensor(self, out, x, True)

    def alltoall(self, out: Tensor, x: Tensor) -> Task | None:
        return Methods.all_to_all_tensor(self, out, x, False)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], sync_op: bool
    ) -> Task | None:
        return exchange.alltoall_single(out, x, in_sizes or None, out_sizes or None, _communicator(self), sync_op)

    def all_to_all_single_on_calc_stream(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> Task | None:
        return Methods.all_to_all_single(self, out, x, out_sizes, in_sizes, True)

    def alltoall_single(self, out: Tensor, x: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int]) -> Task | None:
        return Methods.all_to_all_single(self, out, x, out_sizes, in_sizes, True)

    def barrier(self, device_id: int = -1) -> Task:
        collectives.barrier(_communicator(self))
        return Done(None)

    def broadcast(self, tensor: Tensor, src: int, sync_op: bool = False) -> Task | None:
        return collectives.broadcast(tensor, src, _communicator(self), sync_op)

    def broadcast_on_calc_stream(self, tensor: Tensor, src: int) -> Task | None:
        return collectives.broadcast(tensor, src, _communicator(self))

    def gather(
        self, x: Tensor, out: list[Tensor], dst: int, sync_op: bool, use_calc_stream: bool = False
    ) -> Task | None:
        comm = _communicator(self)
        (x,) = _apart([x], *(out if comm.rank == dst else ()))
        return collectives.gather(x, out, dst, comm, sync_op or use_calc_stream)

    def reduce(self, tensor: Tensor, dst: int, op: Any = 0, sync_op: bool = False) -> Task | None:
        return collectives.reduce(tensor, dst, int(op), _communicator(self), sync_op)

    def reduce_on_calc_stream(self, tensor: Tensor, dst: int, op: Any) -> Task | None:
        return collectives.reduce(tensor, dst, int(op), _communicator(self))

    def reduce_scatter(self, out: Tensor, x: Sequence[Tensor], op: Any, sync_op: bool) -> Task | None:
        return collectives.reduce_scatter(out, _apart(x, out), int(op), _communicator(self), sync_op)

    def reduce_scatter_on_calc_stream(self, out: Tensor, x: Sequence[Tensor], op: Any) -> Task | None:
        return Methods.reduce_scatter(self, out, x, op, True)

    def reduce_scatter_tensor(self, out: Tensor, x: Tensor, op: Any, sync_op: bool) -> Task | None:
        return collectives.reduce_scatter(out, x, int(op), _communicator(self), sync_op)

    def reduce_scatter_tensor_on_calc_stream(self, out: Tensor, x: Tensor, op: Any) -> Task | None:
        return collectives.reduce_scatter(out, x, int(op), _communicator(self))

    def scatter(self, out: Tensor, x: Any, src: int, sync_op: bool | None = None) -> Task | None:
        """Scatters a list; without ``sync_op`` the first argument is the input, one tensor, the second the output."""
        if sync_op is None:
            return Methods.scatter_tensor(self, x, out, src, False)
        return collectives.scatter(out, _apart(x, out), src, _communicator(self), sync_op)

    def scatter_on_calc_stream(self, out: Tensor, x: Sequence[Tensor], src: int) -> Task | None:
        return Methods.scatter(self, out, x, src, True)

    def scatter_tensor(self, out: Tensor, x: Tensor, src: int, sync_op: bool) -> Task | None:
        (x,) = _apart([x], out)
        return collectives.scatter(out, x, src, _communicator(self), sync_op)

    def scatter_tensor_on_calc_stream(self, out: Tensor, x: Tensor, src: int) -> Task | None:
        return Methods.scatter_tensor(self, out, x, src, True)

    def send(self, tensor: Tensor, dst: int, sync_op: bool = False) -> Task | None:
        return messages.send(tensor, dst, _communicator(self), sync_op)

    def send_on_calc_stream(self, tensor: Tensor, dst: int) -> Task | None:
        return messages.send(tensor, dst, _communicator(self))

    def send_partial(self, tensor: Tensor, dst: int, num: int, id: int, sync_op: bool = True) -> Task | None:
        return messages.send(_part(tensor, num, id), dst, _communicator(self), sync_op)

    def send_partial_on_calc_stream(self, tensor: Tensor, dst: int, num: int, id: int) -> Task | None:
        return Methods.send_partial(self, tensor, dst, num, id)

    def recv(self, tensor: Tensor, src: int, sync_op: bool = False) -> Task | None:
        return messages.recv(tensor, src, _communicator(self), sync_op)

    def recv_on_calc_stream(self, tensor: Tensor, src: int) -> Task | None:
        return messages.recv(tensor, src, _communicator(self))

    def recv_partial(self, tensor: Tensor, src: int, num: int, id: int, sync_op: bool = True) -> Task | None:
        return messages.recv(_part(tensor, num, id), src, _communicator(self), sync_op)

    def recv_partial_on_calc_stream(self, tensor: Tensor, src: int, num: int, id: int) -> Task | None:
        return Methods.recv_partial(self, tensor, src, num, id)

    def _start_coalescing(self) -> None:
        """Does nothing: messages start one by one."""

    def _end_coalescing(self, tasks: Any = None) -> None:
        """Does nothing."""


class ProcessGroup(Methods):
    """A process group of some of the ranks, which has no other methods.

    Args:
        rank: This process's rank in the group.
        size: The number of its ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "GLOO"  # Paddle's name for host memory


# What Paddle's MoE gates compute on GPUs only: the operators of ``paddle.distributed.models.moe.utils``, on CPU. They
# have the values of Paddle's kernels where these run one element after the other. None has a gradient, as in Paddle.


def _integers(name: str, x: Tensor) -> npt.NDArray[Any]:
    check_tensor(name, x)
    if x.dtype not in (paddle.int32, paddle.int64):
        raise InvalidTensorError(f"{name} has dtype {x.dtype}, expected paddle.int32 or paddle.int64", 13, id=2099)
    array: npt.NDArray[Any] = x.numpy()
    return array


def _number_count(numbers: Tensor, upper_range: int) -> Tensor:
    """Returns how often each of 0 to ``upper_range`` - 1 occurs; others, such as -1, are not counted."""
    values = _integers("numbers", numbers)
    chosen = values[(values >= 0) & (values < upper_range)]
    return paddle.to_tensor(np.bincount(chosen, minlength=upper_range).astype(values.dtype))


def _assign_pos(x: Tensor, cum_count: Tensor) -> Tensor:
    """Returns the places in ``x``, taken flat, of each expert's number, expert by expert, the last place first.

    ``cum_count[e]`` is how many of experts 0 to e there are. Places of -1 are left out.
    """
    values, ends = _integers("x", x).reshape(-1), _integers("cum_count", cum_count)
    places = np.empty(int(ends[-1]), ends.dtype)
    for expert, end in enumerate(ends):
        chosen = np.flatnonzero(values == expert)[::-1]
        places[end - chosen.size : end] = chosen
    return paddle.to_tensor(places)


def _random_routing(topk_idx: Tensor, topk_value: Tensor, prob: Tensor, topk: int = 2) -> Tensor:
    """Returns ``topk_idx`` with -1 as a token's second expert where twice its value is below ``prob``."""
    if topk != 2:
        raise RuntimeError("only topk=2 is supported now")
    check_tensor("topk_idx", topk_idx)
    dropped = topk * topk_value[:, topk - 1] < prob
    last = paddle.where(dropped, paddle.full_like(topk_idx[:, topk - 1], -1), topk_idx[:, topk - 1])
    return paddle.concat([topk_idx[:, : topk - 1], last.unsqueeze(1)], axis=1)


def _limit_by_capacity(expert_count: Tensor, capacity: Tensor, n_worker: int) -> Tensor:
    """Returns the counts of ``n_worker`` workers for each expert, cut to what its capacity leaves, worker by worker."""
    counts, limits = _integers("expert_count", expert_count), _integers("capacity", capacity)
    rows = counts.reshape(n_worker, limits.size)
    left = limits - (np.cumsum(rows, axis=0) - rows)
    return paddle.to_tensor(np.clip(left, 0, rows).astype(counts.dtype).reshape(counts.shape))


def _prune_gate_by_capacity(gate_idx: Tensor, expert_count: Tensor, n_expert: int, n_worker: int) -> Tensor:
    """Returns ``gate_idx`` with -1 where an expert's number occurs more often than ``expert_count`` has for it."""
    gates, limits = _integers("gate_idx", gate_idx), _integers("expert_count", expert_count).reshape(-1)
    if limits.size != n_expert * n_worker:
        raise InvalidTensorError(f"expert_count has {limits.size} elements, expected {n_expert} * {n_worker}", id=2100)
    values = gates.reshape(-1).copy()
    for expert, limit in enumerate(limits):
        values[np.flatnonzero(values == expert)[max(int(limit), 0) :]] = -1
    return paddle.to_tensor(values.reshape(gates.shape))


_GATES = (_number_count, _assign_pos, _random_routing, _limit_by_capacity, _prune_gate_by_capacity)
