"""NPUGraph on emulated NPUs: what runs between capture_begin and capture_end runs again, in order, by replay.

A mode below autograd sees every operator of the thread (and of its backward pass), those of torch_npu and the
collectives of torch.distributed too. A graph keeps them with their arguments; a replay calls them once more on the
same memory and puts what they return into the tensors that the capture gave. On a device a capture runs nothing: what
it writes into memory from before is put back when it ends.

A group of operators (graph_task_group_begin, _end) is called with other arguments from the next replay on, where an
update (graph_task_update_begin, _end) has called them so; what they return still goes where the capture put it.

Refused by name: operators whose result goes to the host or whose size depends on values, and graphs with conditions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils import _python_dispatch as modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["install"]

_REFUSED = (
    "begin_capture_to_if_node", "end_capture_to_conditional_node", "debug_dump", "super_kernel_optimize",
)  # fmt: skip
_FROM_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_graphs: dict[int, _Recorder] = {}  # by the NPUGraph's id
_capturing: list[_Recorder] = []  # one at most
_begins: list[int] = []  # of groups, among the calls
_updates: list[tuple[_Recorder, list[_Call]]] = []


class _Call(NamedTuple):
    """An operator, its arguments, and the tensors of its own memory that it returned."""

    operator: Any
    args: Any
    kwargs: Any
    fresh: list[tuple[int, torch.Tensor]]  # place among the results


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address


def _as_it_is(tree: Any) -> Any:
    """The same memory in tensors of their own: a program may yet change the shape of its own in place."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), tree)


class _Recorder(modes.TorchDispatchMode):
    """Keeps what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.groups: list[tuple[int, list[_Call]]] = []  # where each stands among the calls
        self._made: set[int] = set()  # addresses of memory that the capture made
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # memory, and what was in it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _check(func, args, kwargs)
        given = {_address(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _written(func, args, kwargs):
            self._keep(tensor)
        call = func, _as_it_is(args), _as_it_is(kwargs)
        results = func(*args, **kwargs)
        fresh = [
            (place, leaf.detach())
            for place, leaf in enumerate(tree_leaves(results))
            if isinstance(leaf, torch.Tensor) and _address(leaf) not in given
        ]
        self._made.update(_address(tensor) for _, tensor in fresh)
        if _computes(func):
            self.calls.append(_Call(*call, fresh))
        return results

    def group(self, begin: int) -> list[_Call]:
        """The calls from there on, which an update may replace."""
        group = self.calls[begin:]
        del self.calls[begin:]
        self.groups.append((begin, group))
        return group

    def _keep(self, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        if address and address not in self._made and address not in self._before:
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._before[address] = whole, whole.clone()

    def restore(self) -> None:
        """Memory from before the capture gets its values again. Nothing of it runs on any stream from then on."""
        torch.npu.synchronize()
        for memory, values in self._before.values():
            memory.copy_(values)
        self._before.clear()
        torch.npu.synchronize()

    def replay(self) -> None:
        places = [place for place, _ in self.groups]
        parts = [self.calls[a:b] for a, b in zip([0, *places], [*places, None], strict=True)]
        groups = [*(group for _, group in self.groups), []]
        with torch.no_grad():
            for call in (call for part, group in zip(parts, groups, strict=True) for call in (*part, *group)):
                results = tree_leaves(call.operator(*call.args, **call.kwargs))
                for place, target in call.fresh:
                    _put(call.operator, target, results[place])
                if call.operator.namespace == "c10d":
                    torch.npu.synchronize()  # there is no handle to wait for


def _check(func: Any, args: Any, kwargs: Any) -> None:
    to_host = func.name() in ("aten::_to_copy", "aten::copy_") and _moves_to_host(func, args, kwargs)
    if to_host or _FROM_VALUES & set(func.tags):
        raise RuntimeError(f"{func.name()} cannot be captured in an NPUGraph: what it gives is needed before replay")


def _moves_to_host(func: Any, args: Any, kwargs: Any) -> bool:
    if func.name() == "aten::_to_copy":
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cpu" and args[0].device.type == "npu"
    return args[0].device.type == "cpu" and args[1].device.type == "npu"


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors whose memory the operator may write; the schemas of collectives do not say it."""
    if func.namespace == "c10d":
        return _tensors((args, kwargs))
    arguments = func._schema.arguments
    given = dict(zip([argument.name for argument in arguments], args, strict=False)) | kwargs
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    return _tensors([value for name, value in given.items() if name in written])


def _computes(func: Any) -> bool:
    """Whether there is something to do again: not for views, new memory, and changes of a shape."""
    returns = func._schema.returns
    is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    allocates = func.namespace == "aten" and func.name().removeprefix("aten::").startswith(("empty", "new_empty"))
    return not is_view and not allocates and torch.Tag.inplace_view not in func.tags


def _put(operator: Any, target: torch.Tensor, value: torch.Tensor) -> None:
    if value.shape != target.shape:
        raise RuntimeError(
            f"{operator.name()} gives {tuple(value.shape)} in a replay, expected {tuple(target.shape)} as when captured"
        )
    target.copy_(value)


def _begin(self: Any, pool: Any = None, capture_error_mode: str = "global", report_shape: bool = True) -> None:
    if _capturing:
        raise RuntimeError("an NPUGraph is being captured, expected one at a time")
    if torch.npu.current_stream() == torch.npu.default_stream():
        raise RuntimeError(
            "an NPUGraph is captured on the default stream, expected another one (torch.npu.graph has one)"
        )
    recorder = _graphs[id(self)] = _Recorder()
    _capturing.append(recorder)
    _below_others(recorder.__enter__)


def _end(self: Any) -> None:
    recorder = _capturing.pop()
    _below_others(lambda: recorder.__exit__(None, None, None))
    recorder.restore()


def _below_others(change: Callable[[], Any]) -> None:
    """Changes the stack of modes where this one is the lowest: those above may call other operators."""
    above = []
    while (top := modes._get_current_dispatch_mode()) is not None and not isinstance(top, _Recorder):
        above.append(modes._pop_mode())
    change()
    for mode in reversed(above):
        modes._push_mode(mode)


def _replay(self: Any) -> None:
    recorder = _graphs.get(id(self))
    if recorder is None:
        raise RuntimeError("the NPUGraph is replayed, expected a capture before")
    recorder.replay()


def _reset(self: Any) -> None:
    _graphs.pop(id(self), None)


def _task_begin(stream: Any) -> None:
    if not _capturing:
        raise RuntimeError("graph_task_group_begin is called outside of a capture of an NPUGraph")
    _begins.append(len(_capturing[-1].calls))


def _task_end(stream: Any) -> list[_Call]:
    """The handle for updates."""
    return _capturing[-1].group(_begins.pop())


def _update_begin(stream: Any, handle: list[_Call]) -> None:
    recorder = _Recorder()
    _updates.append((recorder, handle))
    _below_others(recorder.__enter__)


def _update_end(stream: Any) -> None:
    recorder, handle = _updates.pop()
    _below_others(lambda: recorder.__exit__(None, None, None))
    recorder.restore()
    names = [[call.operator for call in calls] for calls in (handle, recorder.calls)]
    if names[0] != names[1]:
        raise RuntimeError(f"an update of an NPUGraph calls {names[1]}, expected {names[0]} as when captured")
    handle[:] = [new._replace(fresh=old.fresh) for old, new in zip(handle, recorder.calls, strict=True)]


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not among what the emulator does with an NPUGraph")

    return refuse


def install() -> None:
    """Puts this in place of torch_npu's capture, which needs a device's."""
    module: Any = importlib.import_module("torch_npu.npu.graphs")
    base = module._NPUGraph
    base.capture_begin, base.capture_end, base.replay, base.reset = _begin, _end, _replay, _reset
    base.pool = lambda self: (0, id(self))
    base.__del__ = _reset
    for name in _REFUSED:
        setattr(base, name, _refusal(name))
    module._graph_task_group_begin, module._graph_task_group_end = _task_begin, _task_end
    module._graph_task_update_begin, module._graph_task_update_end = _update_begin, _update_end
    module._npu_isCurrentStreamCapturing = lambda: bool(_capturing)
