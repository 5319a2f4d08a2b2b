"""Replaces MindSpore's functions by ours, so that a program for NPUs runs on CPU unchanged."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import mindspore
from mindspore import communication
from mindspore.communication import comm_func as mindspore_comm_func
from mindspore.communication import management
from mindspore.mint import distributed as mindspore_distributed

from alltoallv.mindspore import comm_func, distributed
from alltoallv.mindspore.tensors import target

_GROUPS = (
    *("get_rank", "get_group_size", "get_local_rank", "get_local_rank_size", "create_group", "destroy_group"),
    *("get_world_rank_from_group_rank", "get_group_rank_from_world_rank"),
)
_replaced: list[tuple[Any, str, Any]] = []


class install:
    """Replaces MindSpore's communication functions by ours, on CPU, until `uninstall` or the end of ``with``.

    It replaces these attributes of MindSpore's modules:

    - every name of ``mindspore.mint.distributed`` (by the names of `alltoallv.mindspore.distributed`), so that
      ``mint.distributed.init_process_group()`` comes up without an NPU;
    - every name of ``mindspore.communication.comm_func``;
    - the functions about ranks and groups of ``mindspore.communication``: get_rank, get_group_size, get_local_rank,
      get_local_rank_size, create_group, destroy_group, get_world_rank_from_group_rank,
      get_group_rank_from_world_rank, get_process_group_ranks;
    - ``mindspore.set_device`` and ``set_context``, in which "Ascend" means CPU where MindSpore has no Ascend.

    It replaces nothing else: ``mindspore.communication.init`` (not needed), ``mindspore.ops.AllReduce`` and the other
    primitives, and ``mindspore.ops.communication`` stay MindSpore's. Names that a module has imported before with
    ``from ... import ...`` also stay: install first. Our functions do not work in ``ms.jit``; use the cell `AllToAllV`
    there.

    A second call changes nothing. To run a program without any change:
    ``msrun ... examples/mindspore_on_cpu.py program.py``.
    """

    def __init__(self) -> None:
        if _replaced:
            return
        for name in distributed.__all__:
            ours = getattr(distributed, name)
            for module in (mindspore_distributed, sys.modules[f"{mindspore_distributed.__name__}.distributed"]):
                _replace(module, name, ours)
        for name in mindspore_comm_func.__all__:
            _replace(mindspore_comm_func, name, getattr(comm_func, name))
        for module in (communication, management):
            for name in _GROUPS:
                _replace(module, name, getattr(comm_func, name))
            _replace(module, "get_process_group_ranks", distributed.get_process_group_ranks)
        for module, name in ((mindspore, "set_device"), (mindspore, "set_context"), (mindspore.context, "set_context")):
            _replace(module, name, _on_cpu(getattr(module, name)))

    def __enter__(self) -> install:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        uninstall()


def uninstall() -> None:
    """Puts MindSpore's own functions back; does nothing if `install` has not been called."""
    while _replaced:
        module, name, theirs = _replaced.pop()
        setattr(module, name, theirs)


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


def _replace(module: Any, name: str, ours: Any) -> None:
    _replaced.append((module, name, getattr(module, name)))
    setattr(module, name, ours)
