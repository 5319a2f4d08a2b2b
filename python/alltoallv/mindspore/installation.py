"""Replaces MindSpore's functions by ours, so that a program for NPUs runs on CPU unchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import mindspore
from mindspore.communication import comm_func as mindspore_comm_func
from mindspore.communication import management
from mindspore.graph._parse.resources import convert_object_map
from mindspore.mint import distributed as mindspore_distributed
from mindspore.ops import communication as mindspore_ops

from alltoallv._calls.front_end import Replacements
from alltoallv.mindspore import comm_func, communication_ops, distributed, primitives
from alltoallv.mindspore.primitives import STAND_INS
from alltoallv.mindspore.tensors import in_queue, target

__all__ = ["install", "uninstall"]

_GROUPS = (
    *(
        "get_comm_name",
        "get_rank",
        "get_group_size",
        "get_local_rank",
        "get_local_rank_size",
        "create_group",
        "destroy_group",
    ),
    *("get_world_rank_from_group_rank", "get_group_rank_from_world_rank"),
)
_replaced = Replacements("mindspore")
_in_graphs: list[Any] = []  # functions for which MindSpore's parser takes others


class install:
    """Replaces MindSpore's communication functions by ours, on CPU, until `uninstall` or the end of ``with``.

    It replaces these, in all modules of MindSpore that have imported them:

    - every name of ``mindspore.mint.distributed`` (by the names of `alltoallv.mindspore.distributed`), so that
      ``mint.distributed.init_process_group()`` comes up without an NPU, and every name of
      ``mindspore.ops.communication``;
    - every name of ``mindspore.communication.comm_func``; all_reduce, all_gather_into_tensor, barrier, broadcast,
      gather_into_tensor, reduce_scatter_tensor and scatter_tensor also in graphs;
    - ``mindspore.communication.init`` under every launcher and with every backend's name, ``release``,
      ``get_comm_name``, and the functions about ranks and groups: get_rank, get_group_size, get_local_rank,
      get_local_rank_size, create_group, destroy_group, get_world_rank_from_group_rank,
      get_group_rank_from_world_rank, get_process_group_ranks;
    - the communication primitives of ``mindspore.ops``: AllGather, AllGatherV, AllReduce, AlltoAll, AlltoAllV,
      AlltoAllVC, Barrier, BatchISendIRecv, Broadcast, CollectiveGather, CollectiveScatter, NeighborExchange,
      NeighborExchangeV2, Receive, Reduce, ReduceScatter, ReduceScatterV, Send. Their stand-ins are subclasses: they run
      in PyNative and in graphs, with the gradients that MindSpore defines. In a graph they need g++ and ninja, which
      compile kernels at the first such graph; the kernels serve the process until it ends, also after `uninstall`;
    - ``mindspore.set_device`` and ``set_context``, in which "Ascend" means CPU where MindSpore has no Ascend.

    Where MindSpore computes on Ascend, ``init`` and the primitives stay MindSpore's. Names that a module of the program
    has imported before with ``from ... import ...`` also stay: install first.

    A second call changes nothing. To run a program without any change:
    ``msrun ... examples/mindspore_on_cpu.py program.py``.
    """

    def __init__(self) -> None:
        if _replaced:
            return
        pairs = [
            *((getattr(mindspore_ops, name), getattr(communication_ops, name)) for name in communication_ops.__all__),
            *((getattr(mindspore_distributed, name), getattr(distributed, name)) for name in distributed.__all__),
            *((getattr(mindspore_comm_func, name), getattr(comm_func, name)) for name in mindspore_comm_func.__all__),
            *((getattr(management, name), getattr(comm_func, name)) for name in _GROUPS),
            (management.get_process_group_ranks, distributed.get_process_group_ranks),
        ]
        if not in_queue():
            pairs += [(getattr(management, name), getattr(comm_func, name)) for name in ("init", "release")]
            pairs += [(each.__bases__[-1], each) for each in STAND_INS]
            for name in primitives.__all__:
                _in_graphs.append(getattr(comm_func, name))
                convert_object_map[_in_graphs[-1]] = getattr(primitives, name)
        _replaced.everywhere(pairs)
        for module, name in ((mindspore, "set_device"), (mindspore, "set_context"), (mindspore.context, "set_context")):
            _replaced.replace(module, name, _on_cpu(getattr(module, name)))

    def __enter__(self) -> install:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        uninstall()


def uninstall() -> None:
    """Puts MindSpore's own functions back; does nothing if `install` has not been called."""
    _replaced.undo()
    while _in_graphs:
        del convert_object_map[_in_graphs.pop()]


def _on_cpu(theirs: Callable[..., None]) -> Callable[..., None]:
    """Wraps a MindSpore function so that "Ascend" means CPU."""

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> None:
        if target() == "CPU" and "Ascend" in (*args, *kwargs.values()):
            # Also drop the device number.
            args = ("CPU",) if args else ()
            kwargs = {k: "CPU" if v == "Ascend" else v for k, v in kwargs.items() if k != "device_id"}
        theirs(*args, **kwargs)

    return call
