"""Puts this package under Paddle's own functions, so that a program for GPUs runs on CPU unchanged."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import paddle
from paddle.base import core
from paddle.distributed import collective, fleet, parallel
from paddle.distributed.communication import group as collective_groups
from paddle.distributed.models.moe import utils as gate_operators
from paddle.distributed.utils import moe_utils, nccl_utils

from alltoallv import communicator
from alltoallv._calls import messages, subgroups
from alltoallv._calls.front_end import Replacements
from alltoallv.errors import BackendUnavailableError
from alltoallv.launch import detect as launch
from alltoallv.paddle import exchange, gates
from alltoallv.paddle.group import check_backend, wait
from alltoallv.paddle.process_group import Methods, ProcessGroup

__all__ = ["install", "uninstall"]

_GATES = ("_number_count", "_assign_pos", "_random_routing", "_limit_by_capacity", "_prune_gate_by_capacity")
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
            *((getattr(gate_operators, name), getattr(gates, name)) for name in _GATES),
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
    gathered: list[str] = messages.all_gather(comm, endpoint)(-1.0)
    return gathered
