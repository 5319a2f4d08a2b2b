"""Lets dispatch modes see the collectives of backend ``alltoallv``, as they see the collectives of other backends.

The methods of a group that is written in Python are called without torch's dispatcher. While a mode is active they call
methods of the group of torch's engines, which dispatch the operators (``c10d::``): first to a mode of ours, which names
the group itself, then to those that were active, and at last to another mode of ours, which calls the group's methods.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C import _len_torch_dispatch_stack as active
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from alltoallv.torch.process_group.group import EngineGroup
from alltoallv.torch.process_group.work import WorkList

__all__ = ["active", "dispatch"]

# For each operator the group's method, and the class of its options, if it has any.
_METHODS = {
    "allreduce_": ("allreduce", c10d.AllreduceOptions),
    "allreduce_coalesced_": ("allreduce_coalesced", c10d.AllreduceCoalescedOptions),
    "broadcast_": ("broadcast", c10d.BroadcastOptions),
    "reduce_": ("reduce", c10d.ReduceOptions),
    "allgather_": ("allgather", c10d.AllgatherOptions),
    "_allgather_base_": ("_allgather_base", c10d.AllgatherOptions),
    "allgather_coalesced_": ("allgather_coalesced", c10d.AllgatherOptions),
    "allgather_into_tensor_coalesced_": ("allgather_into_tensor_coalesced", c10d.AllgatherOptions),
    "gather_": ("gather", c10d.GatherOptions),
    "scatter_": ("scatter", c10d.ScatterOptions),
    "reduce_scatter_": ("reduce_scatter", c10d.ReduceScatterOptions),
    "_reduce_scatter_base_": ("_reduce_scatter_base", c10d.ReduceScatterOptions),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", c10d.ReduceScatterOptions),
    "alltoall_": ("alltoall", c10d.AllToAllOptions),
    "alltoall_base_": ("alltoall_base", c10d.AllToAllOptions),
    "barrier": ("barrier", c10d.BarrierOptions),
    "send": ("send", None),
    "recv_": ("recv", None),
    "recv_any_source_": ("recv_anysource", None),
}
_OPTIONS = {"root_rank": "rootRank", "root_tensor": "rootTensor", "async_op": "asyncOp"}  # arguments, and their fields
_UNUSED = {"sparse_indices", "device_ids", "tensor"}  # `tensor`: what a barrier gives the dispatcher

_made = threading.local()  # the work of the operator that this thread dispatches
_ended = WorkList([])


def dispatch(group: EngineGroup, method: str, *arguments: Any) -> Any:
    """Calls a method of a group as an operator while a mode is `active`; returns the work."""
    _made.work = None
    arguments = tuple(
        x.tolist() if isinstance(x, torch.Tensor) and j > 1 else x for j, x in enumerate(arguments)
    )  # splits
    with _below_all(_Run()), _Of(group):
        work = getattr(group._engines, method)(*arguments)
    produced, _made.work = _made.work, None
    return work if produced is None else produced  # a mode may have kept the operator to itself


@contextlib.contextmanager
def _below_all(mode: TorchDispatchMode) -> Iterator[None]:
    """Puts a mode where operators come to it after all others, but for torch's own, such as FakeTensorMode."""
    others = [each for each in _get_current_dispatch_mode_stack() if getattr(each, "_mode_key", None) is None]
    for _ in others:
        _pop_mode()
    try:
        with mode:
            for each in others:
                _push_mode(each)
            try:
                yield
            finally:
                for _ in others:
                    _pop_mode()
    finally:
        for each in others:
            _push_mode(each)


class _Of(TorchDispatchMode):
    """Names the group itself in place of its engines'."""

    def __init__(self, group: EngineGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            index = _place(func._schema)
            args = (*args[:index], self._group.boxed(), *args[index + 1 :])
        return func(*args, **(kwargs or {}))


class _Run(TorchDispatchMode):
    """Calls the method of the group for which an operator stands, unless one of torch's own modes is to see it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        method, options = _METHODS.get(func._schema.name.removeprefix("c10d::"), ("", None))
        if method and not active():
            group = dist.ProcessGroup.unbox(args[_place(func._schema)])
            if isinstance(group, EngineGroup):
                return _run(group, func._schema, method, options, args)
        return func(*args, **(kwargs or {}))


def _run(group: EngineGroup, schema: Any, method: str, options: Any, args: tuple[Any, ...]) -> Any:
    """Returns what the operator returns."""
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    arguments = defaults | dict(zip(defaults, args, strict=False))
    opts: Any = None if options is None else options()
    own = []
    for name, value in arguments.items():
        if name == "process_group" or name in _UNUSED:
            continue
        if name == "reduce_op":
            opts.reduceOp = dist.ReduceOp(dist.ReduceOp.RedOpType(value.op()))
        elif name == "timeout":
            opts.timeout = timedelta(milliseconds=value)
        elif name not in _OPTIONS:
            own.append(value)
        elif hasattr(opts, _OPTIONS[name]):
            setattr(opts, _OPTIONS[name], value)
    work = getattr(group, method)(*own, *([] if opts is None else [opts]))
    _made.work = work = _ended if work is None else work  # it keeps the work, which the dispatcher would not
    return (args[0], work.boxed()) if len(schema.returns) > 1 else work.boxed()


def _place(schema: Any) -> int:
    return [argument.name for argument in schema.arguments].index("process_group")
