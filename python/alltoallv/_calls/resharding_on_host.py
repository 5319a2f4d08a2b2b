"""Moves tensors in host memory between layouts: any framework's are seen as arrays over their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv._calls.adapters import Adapter, as_bytes, check_untracked
from alltoallv._calls.collectives import Map
from alltoallv._calls.guard import guard
from alltoallv._calls.layouts import Layout, boxes, read_layout
from alltoallv._calls.resharding import WIDE, Coding, Described, Placed, Resharding
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name, numpy_dtype
from alltoallv.errors import InvalidParamError, InvalidTensorError

Array = npt.NDArray[Any]
Read = Callable[[str, Any, int], Layout]

_STEPS = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


class _Tools:
    """Makes arrays over tensors of the framework, and finds the tensor of an array."""

    def __init__(self, adapter: Adapter[Any], comm: Communicator, *, views: bool = True) -> None:
        self._adapter, self._comm, self._views = adapter, comm, views
        self._tensors: dict[int, Any] = {}  # by address
        self._begun: list[Any] = []

    def seen(self, x: Any) -> Array:
        """Returns the memory of a contiguous tensor as an array."""
        if isinstance(x, np.ndarray):
            return x
        return as_bytes(self._adapter.region(x)).view(numpy_dtype(self._adapter.dtype(x))).reshape(tuple(x.shape))

    def tensor(self, array: Array | None) -> Any:
        """Returns the tensor of an array that `new` has made, as a view where it has another shape, or a copy."""
        if array is None:
            return None
        kept = self._tensors.get(array.ctypes.data) if array.size else None
        if kept is not None and tuple(kept.shape) == array.shape:
            return kept
        if kept is None or not self._views:
            copy = self.new(array.shape, core_name(array.dtype), False)
            copy[...] = array
            kept = self._tensors[copy.ctypes.data]
        return kept.reshape(array.shape)

    def outputs(self, plan: Resharding[Array], outs: Sequence[Any], inputs: Sequence[Any]) -> list[Array | None]:
        """Checks the caller's outputs and returns their memory."""
        adapter = self._adapter
        with guard(self._comm, "all_to_all_v"):
            declared = [None if out is None else (adapter.check_output("out", out), tuple(out.shape)) for out in outs]
            plan.check_outputs([each and (each[1], each[0]) for each in declared])
            own, theirs = ([adapter.region(x) for x in each if x is not None] for each in (inputs, outs))
            _core.check_lists_apart(theirs, own, "out")
            for out in outs:
                if out is not None:
                    adapter.writes(out)
        return [None if out is None else self.seen(out) for out in outs]

    def new(self, shape: Sequence[int], dtype: str, zero: bool) -> Array:
        tensor = self._adapter.allocate(tuple(shape), dtype, None)
        array = self.seen(tensor)
        if zero:
            array.view(np.uint8)[...] = 0
        self._tensors[array.ctypes.data] = tensor
        return array

    def outcome(self, finish: Callable[[], Any], later: bool, kept: Any) -> Any:
        """Returns what ``finish`` returns, or the handle of the exchanges that have begun, whose result that is."""
        if not later:
            return finish()
        if not self._begun:
            return self._adapter.done(finish())
        return self._adapter.handle(self._comm, self._begun[-1], (self, kept), finish)

    def buffer(self, count: int, dtype: str) -> Array:
        return memory.empty(count, dtype)

    def exchange(self, x: Array, out: Array, placed: Placed, later: bool) -> Callable[[], Any]:
        if placed.plan is None:
            counts = placed.sends, placed.sdispls, placed.recvs, placed.rdispls
            with guard(self._comm, "all_to_all_v"):
                placed.plan = _core.Plan(
                    self._comm.core, "all_to_all_v", core_name(x.dtype), *counts, steps=placed.steps
                )
        addresses = x.ctypes.data, out.ctypes.data
        if not later:
            placed.plan.run(*addresses)
            return lambda: None
        work = placed.plan.submit(*addresses)
        self._begun.append(work)
        return lambda: work.wait() and (x, out)  # which it keeps

    def reduced(self, parts: Sequence[Array], op: str) -> Array:
        dtype = parts[0].dtype
        total = parts[0].astype(numpy_dtype(WIDE.get(core_name(dtype), core_name(dtype))))
        for each in parts[1:]:
            total = _STEPS[op](total, each.astype(total.dtype))
        return (total / total.dtype.type(len(parts)) if op == "avg" else total).astype(dtype)

    def record_bytes(self, coding: Coding, count: int) -> int:
        return _core.quantized_row_bytes(count, coding.format, coding.group_size)

    def coded(self, coding: Coding, x: Array) -> Array:
        x, record = np.ascontiguousarray(x), np.empty(self.record_bytes(coding, x.size), np.uint8)
        row_format = coding.format, coding.group_size, core_name(x.dtype)
        _core.quantize_rows(*row_format, x.ctypes.data, 1, x.size, record.ctypes.data)
        return record

    def decoded(self, coding: Coding, record: Array, count: int, dtype: str) -> Array:
        x = np.empty(count, numpy_dtype(dtype))
        row_format = coding.format, coding.group_size, dtype
        _core.dequantize_rows(*row_format, record.ctypes.data, 1, count, "saturate", x.ctypes.data)
        return x


class Autograd(NamedTuple):
    """A framework's: whether it records calls with tensors, and what records a map of one."""

    wants: Callable[..., bool]
    apply: Callable[[Any, Map[Any]], Any]


class _Moved(Map[Any]):
    """The resharding of one tensor, as autograd sees it."""

    def __init__(self, adapter: Adapter[Any], comm: Communicator, plan: Resharding[Array]) -> None:
        self._adapter, self._comm, self._plan = adapter, comm, plan

    def run(self, input: Any) -> Any:
        tools = _Tools(self._adapter, self._comm, views=False)  # MindSpore loses second gradients of views
        part = None if input is None else tools.seen(self._adapter.read("x", input))
        return tools.tensor(self._plan.begin([part], tools)()[0])

    def transposed(self) -> _Moved:
        return _Moved(self._adapter, self._comm, self._plan.transposed())


class HostPlan:
    """What every front end's ``ReshardPlan`` is; ``dtype`` is the core's name of one."""

    def __init__(
        self,
        adapter: Adapter[Any],
        comm: Communicator,
        shape: Sequence[int],
        dtype: Any,
        source: Any,
        target: Any,
        coding: Callable[[], Coding | None],
        read: Read = read_layout,
        autograd: Autograd | None = None,
    ) -> None:
        self._adapter, self._comm, self._autograd = adapter, comm, autograd
        with guard(comm, "all_gather"):
            agreed_coding = coding()
            full, self._dtype = tuple(int(n) for n in shape), adapter.name(dtype)
            layouts = [read(*each, comm.size) for each in (("source", source), ("target", target))]
            source, target = (each.on(full, name) for each, name in zip(layouts, ("source", "target"), strict=True))
            self.source_shape = boxes(source, full).shape(comm.rank)
            self.target_shape = boxes(target, full).shape(comm.rank)
        described = Described("x", source, target, full, self.source_shape, self._dtype)
        self._plan = Resharding[Array](comm, [described], agreed_coding)
        self.elements_sent, self.elements_received = self._plan.elements_sent, self._plan.elements_received
        self.bytes_sent, self.bytes_received = self._plan.moved_bytes(_Tools(adapter, comm))

    def __call__(self, x: Any, out: Any = None, *, async_op: bool = False) -> Any:
        """Returns this rank's part of the target, or None; ``x`` is its part of the source, or None.

        The part is a new tensor, or ``out``: contiguous, of its shape and dtype, apart from ``x``; for a tensor that
        wants no gradient. With ``async_op`` it returns a handle at once; its ``result()`` waits and returns the part.
        """
        tools = _Tools(self._adapter, self._comm)
        with guard(self._comm, "all_to_all_v"):
            part = None if x is None else self._adapter.read("x", x)
            actual = None if part is None else (tuple(part.shape), self._adapter.dtype(part))
            expected = None if self.source_shape is None else (self.source_shape, self._dtype)
            if actual != expected:
                raise InvalidTensorError(f"x has shape and dtype {actual}, expected {expected}", id=2051)
            recorded = self._autograd if self._autograd and x is not None and self._autograd.wants(x) else None
            if recorded:
                if async_op:
                    raise InvalidParamError(
                        "async_op is True for a tensor that wants a gradient, expected False", id=1157
                    )
                self._plan.check_gradient()
                check_untracked(True, out, "x")
        if recorded:
            return recorded.apply(x, _Moved(self._adapter, self._comm, self._plan))
        outs = None if out is None else tools.outputs(self._plan, [out], [part])
        finish = self._plan.begin([None if part is None else tools.seen(part)], tools, async_op, outs)

        def result() -> Any:
            (array,) = finish()
            return tools.tensor(array) if out is None else out

        return tools.outcome(result, async_op, (part, out))


def reshard_on_host(
    adapter: Adapter[Any],
    comm: Communicator,
    state: Mapping[str, Any],
    source: Any,
    target: Any,
    shapes: Mapping[str, Sequence[int]] | None,
    coding: Callable[[], Coding | None],
    async_op: bool = False,
    read: Read = read_layout,
    single: bool = False,
    autograd: Autograd | None = None,
    out: Any = None,
) -> Any:
    """Returns the parts of the target by name, of a ``single`` tensor its part, or a handle of that."""
    tools = _Tools(adapter, comm)

    def layout(argument: str, layouts: Any, name: str) -> Layout:
        return read(argument, layouts[name] if isinstance(layouts, Mapping) and name in layouts else layouts, comm.size)

    with guard(comm, "all_gather"):
        agreed_coding = coding()
        parts = {name: None if x is None else adapter.read(name, x) for name, x in state.items()}
        described = [
            Described(
                name,
                layout("source", source, name),
                layout("target", target, name),
                tuple(int(n) for n in shapes[name]) if shapes and name in shapes else None,
                None if x is None else tuple(x.shape),
                None if x is None else adapter.dtype(x),
                autograd is not None and autograd.wants(state[name]),
            )
            for name, x in parts.items()
        ]
    plan = Resharding[Array](comm, described, agreed_coding)
    targets = None if out is None else [out] if single else [out[name] for name in parts]
    outs = None if targets is None else tools.outputs(plan, targets, list(parts.values()))
    if autograd is not None and any(wants for *_, wants in plan.terms):
        return _recorded(adapter, comm, state, plan, autograd, async_op, single)
    inputs = [None if x is None else tools.seen(x) for x in parts.values()]
    finish = plan.begin(inputs, tools, async_op, outs)

    def result() -> Any:
        arrays = finish()
        tensors = list(map(tools.tensor, arrays)) if targets is None else targets
        return tensors[0] if single else dict(zip(parts, tensors, strict=True))

    return tools.outcome(result, async_op, (parts, targets))


def _recorded(
    adapter: Adapter[Any],
    comm: Communicator,
    state: Mapping[str, Any],
    plan: Resharding[Array],
    autograd: Autograd,
    async_op: bool,
    single: bool,
) -> Any:
    """Moves one tensor after the other, those that want a gradient in autograd."""
    with guard(comm, "all_to_all_v"):
        if async_op:
            raise InvalidParamError("async_op is True for a tensor that wants a gradient, expected False", id=1157)
        plans = [plan.alone(i) for i in range(len(state))]
        for each, (*_, wants) in zip(plans, plan.terms, strict=True):
            if wants:
                each.check_gradient()
    targets = {}
    for (name, x), each, (*_, wants) in zip(state.items(), plans, plan.terms, strict=True):
        moved = _Moved(adapter, comm, each)
        targets[name] = autograd.apply(x, moved) if wants else moved.run(x)
    return next(iter(targets.values())) if single else targets
