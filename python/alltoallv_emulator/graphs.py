"""NPUGraph on emulated NPUs: a replay runs what ran between capture_begin and capture_end again, in the same order.

A dispatch mode below autograd sees every operator of the thread (and of its backward pass), including the operators of
torch_npu and the collectives of torch.distributed, and those that an operator of the program calls. A graph keeps them
with their arguments; a replay calls them again on the same memory, runs nothing else of the program, and puts their
results into the tensors that the capture returned. On a device a capture runs
nothing, so memory from before the capture gets its old values back when the capture ends. What a capture allocates
lies in a pool of torch_npu's allocator, the graph's own or the one that it is given; as on a device the graph holds the
pool, not the tensors, so that graphs which share a pool use its memory one after the other.

An update (graph_task_update_begin, _end) calls a group of operators (graph_task_group_begin, _end) with other
arguments; later replays use those, and still put the results where the capture put them. Where the capture waits for an
ExternalEvent, a replay stops until somebody records the event; until then its stream does nothing else, and a request
for more work on it raises an error.

Refused by name: operators whose result goes to the host or whose size depends on values, conditional graphs, and
collectives that no operator of torch makes, which the mode does not see. Work of other streams must have been waited
for when a capture ends, as on a device.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils import _python_dispatch as modes
from torch.utils._pytree import tree_leaves, tree_map_only

import alltoallv_emulator

__all__ = ["check_waiting", "install", "recording", "waiting"]

_REFUSED = (
    "begin_capture_to_if_node", "end_capture_to_conditional_node", "debug_dump", "super_kernel_optimize",
)  # fmt: skip
# Namespaces of operators that are one piece of work for a stream.
_COMMUNICATING = {"c10d", "_c10d_functional", "symm_mem", "alltoallv"}
_OPERATORS = {"aten", "npu", "atb", "_C_ascend", "prims", "prim", "alltoallv_emulator", *_COMMUNICATING}
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
_FROM_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_graphs: dict[int, _Recorder] = {}  # by the NPUGraph's id
_capturing: list[_Recorder] = []  # at most one
waiting: list[_Recorder] = []  # those that wait for an event during a replay
_begins: list[int] = []  # where groups begin, as indices of the calls
_updates: list[tuple[_Recorder, list[_Call]]] = []


class _Wait(NamedTuple):
    """A wait for an ExternalEvent."""

    event: Any


class _Call(NamedTuple):
    """An operator, its arguments, and the tensors of its own memory that it returned."""

    operator: Any
    args: Any
    kwargs: Any
    fresh: list[tuple[int, torch.Tensor]]  # (index among the results, tensor)

    def again(self) -> None:
        """Calls the operator on what its memory holds now."""
        results = tree_leaves(self.operator(*self.args, **self.kwargs))
        for index, target in self.fresh:
            if results[index].shape != target.shape:
                raise RuntimeError(
                    f"{self.operator.name()} gives {tuple(results[index].shape)} in a replay of an NPUGraph, "
                    f"expected {tuple(target.shape)} as when captured"
                )
            target.copy_(results[index])
        if self.operator.namespace in ("c10d", "alltoallv"):
            torch.npu.synchronize()  # there is no handle to wait for


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address


def _not_owned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same memory that does not keep it from being freed."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    memory = _native("_weak_ref_tensor")(whole).untyped_storage()
    weak = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return weak.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _native(*names: str) -> Any:
    """Returns a function of torch_npu's library, which not all releases call by the same name."""
    library = importlib.import_module("torch_npu._C")
    return next(getattr(library, name) for name in names if hasattr(library, name))


def _without_values(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Returns what an operator gives for the shapes of its arguments: arguments that it returns, and fresh memory."""
    if not func._schema.returns:
        return None
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        pairs.append((torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"), tensor))
        return pairs[-1][0]

    def result(shape: torch.Tensor) -> torch.Tensor:
        returned = [tensor for other, tensor in pairs if other is shape]
        memory = functools.partial(torch.empty_strided, dtype=shape.dtype, device=device)
        return returned[0] if returned else memory(shape.size(), shape.stride())

    asked = {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
    shapes = func(*tree_map_only(torch.Tensor, stand_in, args), **tree_map_only(torch.Tensor, stand_in, kwargs) | asked)
    return tree_map_only(torch.Tensor, result, shapes)


class _Pool:
    """Memory of torch_npu's allocator for one capture, which may share it with other graphs."""

    def __init__(self, number: tuple[int, int] | None) -> None:
        self.number = number or torch.npu.graph_pool_handle()
        self.device = torch.device("npu", torch.npu.current_device())
        self._release = _native("_npu_releasePool")
        _native("_npu_beginAllocateToPool")(self.device.index, self.number)

    def end(self) -> None:
        """From now on memory comes from elsewhere."""
        _native("_npu_endAllocateToPool", "_npu_endAllocateCurrentStreamToPool")(self.device.index, self.number)

    def release(self) -> None:
        """Gives the memory back, once no other graph has the pool and no tensor lies in it."""
        self._release(self.device.index, self.number)


class _Streams:
    """Knows which captured work every stream has, and which it has waited for."""

    def __init__(self) -> None:
        self._last: dict[Any, int] = {}  # by stream: the number of its last work
        self._seen: dict[Any, dict[Any, int]] = {}  # by stream: what of each stream comes before its next work
        self._events: dict[int, tuple[Any, dict[Any, int]]] = {}  # by id: the event, and what comes before it

    def used(self, stream: Any) -> None:
        self._last[stream] = self._last.get(stream, 0) + 1
        self._seen.setdefault(stream, {})[stream] = self._last[stream]

    def recorded(self, event: Any, stream: Any) -> None:
        self._events[id(event)] = event, dict(self._seen.get(stream, {}))

    def waits(self, event: Any, stream: Any) -> None:
        seen = self._seen.setdefault(stream, {})
        for other, number in self._events.get(id(event), (event, {}))[1].items():
            seen[other] = max(number, seen.get(other, 0))

    def not_awaited_by(self, stream: Any) -> list[Any]:
        seen = self._seen.get(stream, {})
        return [other for other, number in self._last.items() if other != stream and seen.get(other, 0) < number]


class _Recorder(modes.TorchDispatchMode):
    """Records the operators that are called."""

    supports_higher_order_operators = True

    def __init__(self, pool: _Pool | None = None) -> None:
        super().__init__()
        self.pool: Any = pool  # None for an update
        self.calls: list[_Call | list[_Call] | _Wait] = []
        self._rest: Iterator[None] = iter(())  # rest of a replay that waits
        self.stream: Any = None  # stream of the replay
        self._streams = _Streams()
        self._inside = 0  # operators that are being called
        self._made: set[int] = set()  # addresses of memory that the capture made
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # memory, and its values before the capture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            with self:  # it is a function in Python, whose operators are recorded
                return _body(func)(*args, **kwargs)
        if _is_on_host(func, args, kwargs):
            return func(*args, **kwargs)  # no stream gets any work
        _check(func, args, kwargs)
        inputs = {_address(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _written(func, args, kwargs):
            self._keep(tensor)
        call = func, self._kept(args), self._kept(kwargs)
        before, of_program = len(self.calls), _is_of_program(func)
        if of_program:
            with self:  # what it calls is recorded in its place, if there is anything
                results = torch.library.get_kernel(func.name(), "PrivateUse1").call_boxed(_KEYS, *args, **kwargs)
        else:
            with self._calling(func.namespace == "c10d"):
                results = self._run(func, args, kwargs, inputs)
        returned = [
            (index, leaf)
            for index, leaf in enumerate(tree_leaves(results))
            if isinstance(leaf, torch.Tensor) and _address(leaf) not in inputs
        ]
        self._made.update(filter(None, (_address(tensor) for _, tensor in returned)))
        fresh = [(index, self._kept(tensor)) for index, tensor in returned]
        seen = len(self.calls) > before or (of_program and _is_in_python(func))  # all that it does is recorded
        if not seen and _computes(func, bool(fresh)):
            self.calls.append(_Call(*call, fresh))
            self._streams.used(torch.npu.current_stream())
        return results

    def _run(self, func: Any, args: Any, kwargs: Any, inputs: set[int]) -> Any:
        """Calls an operator, whose arguments may be what a program gives values before a replay only.

        Where the operator does not take the present values, its results have the shapes that it gives without values.
        """
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if self.pool is None or not inputs & self._made or func.namespace in _COMMUNICATING:
                raise
            try:
                return _without_values(func, args, kwargs, self.pool.device)
            except Exception:
                raise error from None

    @contextlib.contextmanager
    def _calling(self, queues: bool) -> Iterator[None]:
        """Lets collectives be launched, which belong to an operator that is recorded."""
        self._inside += 1
        alltoallv_emulator.set_option("capturing", 0)
        try:
            yield
            if queues:
                torch.npu.current_stream().npu_stream  # noqa: B018  # launches what torch_npu has queued
        finally:
            self._inside -= 1
            alltoallv_emulator.set_option("capturing", int(self in _capturing and not self._inside))

    def refuse_unseen(self, operator: str) -> None:
        """Raises for a collective of alltoallv that is launched while no operator is called."""
        if not self._inside:
            raise RuntimeError(
                f"{operator} cannot be captured in an NPUGraph this way: the call is not an operator of torch, so that "
                "replays would leave it out"
            )

    def check_joined(self) -> None:
        """Raises if another stream has work that the stream of the capture, the current one, has not waited for."""
        late = self._streams.not_awaited_by(torch.npu.current_stream())
        if late:
            raise RuntimeError(
                f"capture_end of an NPUGraph fails with 107025: {late[0]} has captured work that the stream of the "
                f"capture has not waited for, expected torch.npu.current_stream().wait_stream({late[0]})"
            )

    def group(self, begin: int) -> list[_Call]:
        """Groups the calls from ``begin`` on, which an update may replace, and returns them."""
        group = [call for call in self.calls[begin:] if isinstance(call, _Call)]
        self.calls[begin:] = [group]
        return group

    def _kept(self, tree: Any) -> Any:
        """Returns the same memory in new tensors, since a program may change the shape of its own tensors in place.

        What lies in the pool they do not own: the program may free it there, for what it does later.
        """

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            in_pool = self.pool is not None and tensor.device == self.pool.device and _address(tensor) in self._made
            owned = not in_pool or tensor.is_conj() or tensor.is_neg()
            return tensor.detach() if owned else _not_owned(tensor)

        return tree_map_only(torch.Tensor, kept, tree)

    def _keep(self, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        if address and address not in self._made and address not in self._before:
            storage = tensor.untyped_storage()
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._before[address] = memory, memory.cpu()  # not in the pool

    def restore(self) -> None:
        """Gives memory from before the capture its old values. From then on nothing of the capture is on any stream."""
        torch.npu.synchronize()
        for memory, values in self._before.values():
            memory.copy_(values)
        self._before.clear()
        torch.npu.synchronize()

    def replay(self) -> None:
        check_waiting()
        self._rest, self.stream = self._steps(), torch.npu.current_stream()
        self.advance()

    def _steps(self) -> Iterator[None]:
        """Runs the calls; yields where it has to wait."""
        for step in self.calls:
            if isinstance(step, _Wait):
                while not step.event.happened:
                    yield
                step.event.happened = False
            else:
                for call in step if isinstance(step, list) else [step]:
                    call.again()

    def advance(self) -> None:
        """Runs the replay to its end, or to an event that has not been recorded."""
        with torch.no_grad(), torch.npu.stream(self.stream):
            for _ in self._rest:
                waiting.append(self)
                return


def recording() -> bool:
    """True while a graph is captured or updated."""
    return bool(_capturing or _updates)


def check_waiting() -> None:
    """Raises RuntimeError if a replay on the current stream waits for an event."""
    if waiting and any(recorder.stream == torch.npu.current_stream() for recorder in waiting):
        raise RuntimeError("the stream waits in a replay of an NPUGraph for an ExternalEvent, which was not recorded")


def _is_on_host(func: Any, args: Any, kwargs: Any) -> bool:
    """True for a computation whose arguments and results are not on an NPU."""
    tensors, device = list(_tensors((args, kwargs))), kwargs.get("device")
    if func.namespace in _COMMUNICATING or (device is not None and torch.device(device).type != "cpu"):
        return False
    return all(tensor.is_cpu for tensor in tensors) and (bool(tensors) or func.namespace == "aten")


def _is_of_program(func: Any) -> bool:
    """True for operators that programs and their libraries define, which call other operators on an NPU."""
    return func.namespace not in _OPERATORS and torch._C._dispatch_has_computed_kernel_for_dispatch_key(
        func.name(), "PrivateUse1"
    )


def _is_in_python(func: Any) -> bool:
    """True for an operator whose kernel is a function in Python, so that all that it does is seen."""
    name = f"{func.namespace}/{func.name().split('::')[1]}"
    keys = ("PrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(f"{name}/{key}" in torch.library._impls for key in keys)


def _body(func: Any) -> Any:
    """Returns what a higher-order operator does where no mode traces it."""
    body = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    if body is None:
        raise RuntimeError(f"{func.name()} cannot be captured in an NPUGraph: it has no composition of operators")
    return body


def _check(func: Any, args: Any, kwargs: Any) -> None:
    if func.name() == "alltoallv::call_":
        raise RuntimeError(
            f"{args[2]} cannot be captured in an NPUGraph with these arguments, which no operator of torch has: a "
            "replay could not make the call again"
        )
    if "npu_fusion_attention" in func.name():
        names = [argument.name for argument in func._schema.arguments]
        if (dict(zip(names, args, strict=False)) | kwargs).get("keep_prob", 1.0) != 1.0:
            raise RuntimeError(
                f"{func.name()} cannot be captured in an NPUGraph with keep_prob: a replay of its gradient would not "
                "know which weights a replay has dropped"
            )
    to_host = func.name() in ("aten::_to_copy", "aten::copy_") and _moves_to_host(func, args, kwargs)
    library = sys.modules.get("alltoallv.torch.graph.ops")
    sized = None if library is None else library.sizes_depend_on_values.get(func.name())
    if to_host or _FROM_VALUES & set(func.tags) or (sized is not None and sized(args)):
        raise RuntimeError(f"{func.name()} cannot be captured in an NPUGraph: what it gives is needed before replay")


def _moves_to_host(func: Any, args: Any, kwargs: Any) -> bool:
    if func.name() == "aten::_to_copy":
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cpu" and args[0].device.type == "npu"
    return args[0].device.type == "cpu" and args[1].device.type == "npu"


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors whose memory the operator may write; the schemas of collectives do not say it."""
    if func.namespace == "c10d":
        return _tensors((args, kwargs))
    arguments = func._schema.arguments
    by_name = dict(zip([argument.name for argument in arguments], args, strict=False)) | kwargs
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    return _tensors([value for name, value in by_name.items() if name in written])


def _computes(func: Any, fresh: bool) -> bool:
    """True if a replay must call it again: not for views, new memory, and changes of a shape.

    What may be a view, as of ``contiguous`` and ``to``, is none where its result is fresh memory.
    """
    returns = func._schema.returns
    is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    allocates = func.namespace == "aten" and func.name().removeprefix("aten::").startswith(("empty", "new_empty"))
    return (fresh or not is_view) and not allocates and torch.Tag.inplace_view not in func.tags


def _begin(self: Any, pool: Any = None, capture_error_mode: str = "global", report_shape: bool = True) -> None:
    if _capturing:
        raise RuntimeError("an NPUGraph is being captured, expected one at a time")
    if torch.npu.current_stream() == torch.npu.default_stream():
        raise RuntimeError(
            "an NPUGraph is captured on the default stream, expected another one (torch.npu.graph has one)"
        )
    _reset(self)
    recorder = _graphs[id(self)] = _Recorder(_Pool(pool))
    _capturing.append(recorder)
    _below_others(recorder.__enter__)
    alltoallv_emulator.set_option("capturing", 1)
    if (engines := sys.modules.get("alltoallv.torch.engines.device")) is not None:
        engines.before_launch[:] = [_refuse_unseen]


def _captured(function: str) -> _Recorder:
    """Returns what is being captured, for a function that is of use in a capture alone."""
    if not _capturing:
        raise RuntimeError(f"{function} is called outside of a capture of an NPUGraph")
    return _capturing[-1]


def _end(self: Any) -> None:
    recorder = _captured("capture_end")
    _capturing.clear()
    _begins.clear()
    _below_others(lambda: recorder.__exit__(None, None, None))
    alltoallv_emulator.set_option("capturing", 0)
    recorder.pool.end()
    recorder.restore()
    try:
        recorder.check_joined()
    except RuntimeError:
        _reset(self)
        raise


def _refuse_unseen(operator: str) -> None:
    for recorder in _capturing:
        recorder.refuse_unseen(operator)


def _below_others(change: Callable[[], Any]) -> None:
    """Changes the stack of modes while this one is the lowest: those above may call other operators."""
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


def _reset(self: Any, graphs: dict[int, _Recorder] = _graphs) -> None:  # the module may be gone at exit
    recorder = graphs.pop(id(self), None)
    if recorder is not None:
        recorder.calls.clear()
        recorder.pool.release()


def _pool(self: Any) -> tuple[int, int]:
    recorder = _graphs.get(id(self))
    if recorder is None:
        raise RuntimeError("NPUGraph.pool is called, expected a capture before")
    return recorder.pool.number


def _task_begin(stream: Any) -> None:
    _begins.append(len(_captured("graph_task_group_begin").calls))


def _task_end(stream: Any) -> list[_Call]:
    """Returns the handle for updates."""
    recorder = _captured("graph_task_group_end")
    if not _begins:
        raise RuntimeError("graph_task_group_end is called, expected graph_task_group_begin before")
    return recorder.group(_begins.pop())


def _update_begin(stream: Any, handle: list[_Call]) -> None:
    recorder = _Recorder()
    _updates.append((recorder, handle))
    _below_others(recorder.__enter__)


def _update_end(stream: Any) -> None:
    recorder, handle = _updates.pop()
    _below_others(lambda: recorder.__exit__(None, None, None))
    recorder.restore()
    calls = recorder.group(0)
    names = [[call.operator for call in recorded] for recorded in (handle, calls)]
    if names[0] != names[1]:
        raise RuntimeError(f"an update of an NPUGraph calls {names[1]}, expected {names[0]} as when captured")
    handle[:] = [new._replace(fresh=old.fresh) for old, new in zip(handle, calls, strict=True)]


def _event_wait(self: Any, stream: Any = None) -> None:
    if not _capturing:
        raise NotImplementedError("ExternalEvent.wait is called outside of a capture of an NPUGraph, expected in one")
    _capturing[-1].calls.append(_Wait(self))


def _event_reset(self: Any, stream: Any = None) -> None:
    if not _capturing:  # in a replay its wait resets the event
        self.happened = False


def _event_record(self: Any, stream: Any = None) -> None:
    if _capturing:
        raise NotImplementedError("ExternalEvent.record is called in a capture of an NPUGraph, expected outside")
    (stream or torch.npu.current_stream()).synchronize()
    self.happened = True
    stopped = waiting[:]
    waiting.clear()
    for recorder in stopped:
        recorder.advance()


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not among what the emulator does with an NPUGraph")

    return refuse


def _watch_events(kind: Any) -> None:
    """Follows what streams wait for while a graph is captured."""
    record, wait = kind.record, kind.wait

    def recorded(self: Any, stream: Any = None) -> None:
        record(self, stream)
        for recorder in _capturing:
            recorder._streams.recorded(self, stream or torch.npu.current_stream())

    def waits(self: Any, stream: Any = None) -> None:
        wait(self, stream)
        for recorder in _capturing:
            recorder._streams.waits(self, stream or torch.npu.current_stream())

    kind.record, kind.wait = recorded, waits


def install() -> None:
    """Replaces torch_npu's capture, which needs a device."""
    module: Any = importlib.import_module("torch_npu.npu.graphs")
    base = module._NPUGraph
    base.capture_begin, base.capture_end, base.replay, base.reset = _begin, _end, _replay, _reset
    base.pool = _pool
    base.__del__ = _reset
    for name in _REFUSED:
        setattr(base, name, _refusal(name))
    module._graph_task_group_begin, module._graph_task_group_end = _task_begin, _task_end
    module._graph_task_update_begin, module._graph_task_update_end = _update_begin, _update_end
    _watch_events(torch.npu.Event)
    event = torch.npu.ExternalEvent
    event.happened, event.wait, event.reset, event.record = False, _event_wait, _event_reset, _event_record
    module._npu_isCurrentStreamCapturing = lambda: bool(_capturing)
