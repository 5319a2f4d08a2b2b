"""Lets dispatch modes see the collectives of backend ``alltoallv``, as they see those of other backends.

The methods of a group that is written in Python are called without torch's dispatcher. While a mode is active they call
those of the group of torch's engines, which dispatch the operators (``c10d::``). Then the kernels for CPU tensors call
the group's methods again; they are put before torch's at the first such call, and pass on what is of other groups.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C import _len_torch_dispatch_stack as active
from torch.utils._python_dispatch import TorchDispatchMode

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


def dispatch(group: EngineGroup, method: str, *given: Any) -> Any:
    """Calls a method of a group as an operator while a mode is `active`; returns the work."""
    _install()
    _made.work = None
    given = tuple(x.tolist() if isinstance(x, torch.Tensor) and j > 1 else x for j, x in enumerate(given))  # splits
    with _Of(group):
        work = getattr(group._engines, method)(*given)
    made, _made.work = _made.work, None
    return work if made is None else made  # a mode may have kept the operator to itself


class _Of(TorchDispatchMode):
    """Names the group itself in place of its engines'."""

    def __init__(self, group: EngineGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            place = _place(func._schema)
            args = (*args[:place], self._group.boxed(), *args[place + 1 :])
        return func(*args, **(kwargs or {}))


def _place(schema: Any) -> int:
    return [argument.name for argument in schema.arguments].index("process_group")


@functools.cache
def _install() -> torch.library.Library:
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, (method, options) in _METHODS.items():
            of_torch = torch.library.get_kernel(f"c10d::{name}", "CPU")
            schema = getattr(torch.ops.c10d, name).default._schema
            library.impl(name, _kernel(of_torch, schema, method, options), "CPU", with_keyset=True)
    return library


def _kernel(of_torch: Any, schema: Any, method: str, options: Any) -> Callable[..., Any]:
    """Returns a kernel for CPU tensors, which calls the ``method`` of this backend's groups."""
    arguments = [argument.name for argument in schema.arguments]
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    place = _place(schema)

    def kernel(keys: Any, *args: Any) -> Any:
        group = dist.ProcessGroup.unbox(args[place])
        if not isinstance(group, EngineGroup):
            return of_torch.call_boxed(keys, *args)
        given = defaults | dict(zip(arguments, args, strict=False))
        opts: Any = None if options is None else options()
        own = []
        for name, value in given.items():
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

    return kernel
