"""The ATB-shaped AllToAllV operator and quantized AllReduce, on tensors of any framework, and what they have
in common.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import numpy as np

from alltoallv import _core
from alltoallv._calls import adapters
from alltoallv._calls.adapters import Adapter, Region, check_on_npu
from alltoallv._calls.guard import Member, guard
from alltoallv.atb.params import COUNTS, FIELDS, AllToAllVParam, DeviceInfo, QuantAllReduceParam, QuantType
from alltoallv.communicator import Communicator
from alltoallv.errors import AllToAllVError, BackendUnavailableError, InvalidParamError, InvalidTensorError
from alltoallv.launch import detect as launch
from alltoallv.launch import hccl
from alltoallv.launch.ancestry import process_id
from alltoallv.launch.job import Launch
from alltoallv.launch.options import between_hosts, make_options, on_this_host, take_place
from alltoallv.launch.rank_table import RankTable
from alltoallv.quantization.requests import Feedback
from alltoallv.quantization.spec import Quantization, QuantizedReduction

_connected: dict[tuple[str, str, int], _core.Communicator] = {}


def connect(param: _core.AllToAllVParam, npu: bool = False) -> _core.Communicator:
    """Returns the communicator that an `AllToAllVParam` describes: found by its domain, or made with its ranks.

    Args:
        npu: Whether the tensors are on an NPU instead of in host memory.
    """
    if param.backend not in (("hccl", "auto") if npu else ("hccl", "auto", "shm")):
        raise BackendUnavailableError(
            f"backend is {param.backend!r}, which AllToAllVOperation cannot make by itself", id=5027
        )
    options = make_options(param.comm_domain or "default", 600.0, None)
    options.rank, options.size = param.rank, param.rank_size
    options.threads = int(param.comm_mode) == int(_core.CommMode.MULTI_THREAD)
    job = launch.detect()
    if param.rank_table_file and not npu:
        _check_table(param)
    if options.threads:
        _require_threads(param, job)
        options.job = f"pid-{os.getpid()}"
    else:
        take_place(job, options)
        if job.launcher == "single":  # ranks that no launcher started, such as the children of one test
            options.job = f"parent-{process_id(os.getppid())}"
            start = f"python -m alltoallv run -n {param.rank_size}"
            options.cure = f"; no launcher started this process: start all ranks, for example with {start!r}"
        if not npu and job.several_hosts:
            if param.backend == "shm" or param.rank_size != job.size:
                job.require_one_host(param.rank_size)
            return _kept(options, between_hosts(job, options), "/tcp")
        if not npu and job.launcher != "single":
            return _kept(options, on_this_host(job, options), "")
    core = hccl.from_param(param, options) if npu else _core.communicator(options)
    return _kept(options, core, "/hccl" * npu)


def _require_threads(param: _core.AllToAllVParam, job: Launch) -> None:
    """Raises InvalidParamError for ranks that would wait in vain for others to be threads of this process."""
    alone = param.rank_size > 1 and len(sys._current_frames()) == 1
    if alone or 1 < job.size == param.rank_size:
        why = "this process has one thread" if alone else f"launcher {job.launcher!r} made each rank a process"
        raise InvalidParamError(
            f"comm_mode is MULTI_THREAD, which means {param.rank_size} ranks that are threads of one process, but "
            f"{why}: expected MULTI_PROCESS",
            id=1203,
        )


def _check_table(param: _core.AllToAllVParam) -> None:
    table = RankTable.load(param.rank_table_file).of_size(param.rank_size)
    here = len(table.server_of(param.rank).devices)
    if here < param.rank_size:
        raise BackendUnavailableError(
            f"rank_table_file {param.rank_table_file!r} has {here} of {param.rank_size} ranks on the server of rank "
            f"{param.rank}, and in host memory an operation's ranks share a server",
            id=5028,
        )


def _kept(options: _core.CommunicatorOptions, core: _core.Communicator, transport: str) -> _core.Communicator:
    """Keeps the communicator beyond the operations that use it, as ATB does; destroy() ends it."""
    key = (options.job + transport, options.domain, options.rank)
    for other in [k for k, kept in list(_connected.items()) if k != key and not kept.usable]:
        _connected.pop(other, None)
    _connected[key] = core
    return core


P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")  # a NumPy array, or a tensor of torch, MindSpore or Paddle


class Checks(Protocol):
    """The checks of one rank of several: the peers also raise a failure."""

    def infer_shape(self, inputs: Sequence[_core.TensorDesc]) -> _core.TensorDesc: ...
    def setup(self, inputs: Sequence[_core.TensorDesc], outputs: Sequence[_core.TensorDesc]) -> None: ...


class Operation(ABC):
    """A plan: it knows what it is set up for, and its communicator."""

    _checks: Checks

    def __init__(self, param: Any, kind: type[Any], communicator: Any, device: _core.DeviceInfo | None) -> None:
        for name, value, expected in (("param", param, kind), ("communicator", communicator, Member)):
            if not isinstance(value, expected) and (name, value) != ("communicator", None):
                wanted = "Communicator" if expected is Member else kind.__name__
                raise InvalidParamError(f"{name} is a {type(value).__name__}, expected {wanted}", id=1204)
        self._group: Member | None = None  # whose engine moves the tensors of a device
        self._engine: Any = None  # None in shared memory
        self._ranks = param.rank, param.rank_size
        self._communicator: Communicator | None = communicator if isinstance(communicator, Communicator) else None
        communicator = self._communicator
        self._npu = communicator is not None and communicator.backend == "hccl"
        self._checks_device = device is None
        self._plan: tuple[Hashable, _core.TensorDesc] | None = None  # what it is set up for, and the output of that

    @property
    def _given_core(self) -> _core.Communicator | None:
        return None if self._communicator is None else self._communicator.core

    def _begin(self, core: _core.Operation, operator: str, communicator: Member | None) -> None:
        """Takes the core's operation, and an engine's group if one was given."""
        self._checks, self._plain, self._operator = core, core, operator
        if communicator is not None and self._communicator is None:
            self._use(communicator)

    def _find_engine(self, adapter: Adapter[Any], x: Any) -> None:
        """Finds the group's engine for a tensor that is neither the host's nor an NPU's."""
        if self._engine is None and self._communicator is None and adapter.device(x) not in ("cpu", "npu"):
            self._use(adapter.engine(x, None))

    def _use(self, group: Member) -> None:
        self._engine = self._group = group
        self._checks = _GroupChecks(self._plain, self._operator, self._ranks, group)

    @abstractmethod
    def _check_create(self, device: _core.DeviceInfo) -> None:
        """Checks the param against the device on which the operation will run."""

    def _connect(self, param: _core.AllToAllVParam) -> _core.Communicator:
        """Makes or finds the communicator that the param describes."""
        return connect(param, self._npu)

    def _adapter(self, x: object) -> Adapter[Any]:
        adapter = self._checked(adapters.find, "x", x)
        if self._communicator is None and self._plan is None:
            self._npu = adapter.device(x) == "npu"
        return adapter

    def _as_input(self, name: str, x: Any, adapter: Adapter[Any]) -> Any:
        """Returns ``x``, or a contiguous copy; raises InvalidTensorError if it cannot be an input."""
        self._check_kind(name, x, adapter)
        adapter.check(name, x)
        self._check_place(name, x, adapter)
        if self._npu and self._checks_device:
            self._check_create(_core.DeviceInfo(*_core.npu_devices()))
            self._checks_device = False
        return adapter.contiguous(x)

    def _check_place(self, name: str, x: Any, adapter: Adapter[Any]) -> None:
        if self._group is not None:
            return adapter.check_place(self._group, x)
        device, expected = adapter.device(x), "npu" if self._npu else "cpu"
        if device != expected:
            raise InvalidTensorError(
                f"{name} lies on {device}, expected {expected}, as the operation's communicator", 14, id=2058
            )

    def _check_output(self, out: Any, adapter: Adapter[Any]) -> None:
        self._check_kind("out", out, adapter)
        adapter.check("out", out)
        if not adapter.writable(out):
            raise InvalidParamError("out is not contiguous and writable, expected both", id=1205)

    def _check_kind(self, name: str, x: Any, adapter: Adapter[Any]) -> None:
        if not isinstance(x, adapter.tensor):
            raise InvalidTensorError(f"{name} is a {type(x).__name__}, expected {adapter.kind}, as x", 5, id=2059)

    def _set_up(self, adapter: Adapter[A], inputs: Sequence[A], out: A | None, states: Sequence[Any] = ()) -> A:
        """Sets the plan up unless it is for such tensors; returns the output: ``out``, or a new tensor."""
        expected = self._planned(adapter, inputs, out, states)
        return self._checked(adapter.allocate, expected.shape, expected.dtype, inputs[0]) if out is None else out

    def _planned(
        self, adapter: Adapter[A], inputs: Sequence[A], out: A | None, states: Sequence[Any] = ()
    ) -> _core.TensorDesc:
        """Sets the plan up unless it is for such tensors; returns what the output must be."""
        keys = tuple(map(adapter.key, inputs)), None if out is None else adapter.key(out)
        key = *keys, tuple(a.shape for a in states)
        if self._plan is None or self._plan[0] != key:
            self._plan = None
            descs = [self._checked(describe, a) for a in inputs]
            expected = self._checks.infer_shape(descs)
            outputs = [expected if out is None else self._checked(describe, out), *map(describe, states)]
            self._checks.setup(descs, outputs)
            self._plan = key, expected
        return self._plan[1]

    def _checked(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function`; the peers also raise its errors."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if self._group is None:
                self._plain.announce(error)
            else:
                with contextlib.suppress(AllToAllVError):  # nobody is left to inform: the first error counts
                    self._group.fail(self._operator, error)
            raise


class _GroupChecks:
    """Does for a group of torch.distributed what the core's operation does as one rank of several."""

    def __init__(self, core: _core.Operation, operator: str, ranks: tuple[int, int], group: Member) -> None:
        self._core, self._operator, self._ranks, self._group = core, operator, ranks, group

    def infer_shape(self, inputs: Sequence[_core.TensorDesc]) -> _core.TensorDesc:
        with guard(self._group, self._operator):
            return self._core.check(inputs, [])

    def setup(self, inputs: Sequence[_core.TensorDesc], outputs: Sequence[_core.TensorDesc]) -> None:
        group, (rank, rank_size) = self._group, self._ranks
        with guard(group, self._operator):
            self._core.check(inputs, outputs)
            _core.check_ranks(rank, rank_size, group.rank, group.size, group.domain)


def describe(x: Any) -> _core.TensorDesc:
    """Returns shape and dtype, as the core takes them."""
    return _core.TensorDesc(x.shape, adapters.find("x", x).dtype(x))


class AllToAllVOperation(Operation):
    """Exchanges data between all ranks as its param says. It is a plan, so a repeated call is cheap.

    Takes NumPy arrays and tensors of torch, MindSpore and Paddle, and returns the same kind. Checks and set-up are
    paid once per shape and dtype of the input. Calls are collective: every rank makes the same ones in the same order.
    When a rank's own checks fail in a call, the call fails on every rank. A call on the CPU blocks until this rank's
    output is complete. On an NPU it is launched on torch's current stream, over HCCL, and the host does not wait; the
    param is checked against the device's family and the number of devices, at the first call if not when it is made. On
    a GPU the engine of torch.distributed's group moves the data, as for `alltoallv.torch.all_to_all_v`.
    Results have gradients in MindSpore's PyNative mode alone; in its graphs the results of the cell
    `alltoallv.mindspore.AllToAllVCell` have.
    """

    def __init__(
        self,
        param: AllToAllVParam,
        communicator: Member | None = None,
        *,
        device: DeviceInfo | None = None,
        capacity: int | None = None,
    ) -> None:
        """Checks the param as ATB's CreateOperation does.

        Args:
            param: Copied; later changes have no effect.
            communicator: One of ``param.rank_size`` ranks in which this is ``param.rank``, for tensors of a GPU as
                `alltoallv.torch.from_group` makes it. Left out, the one that the param describes is found or made at
                the first call; tensors of a GPU use torch.distributed's default group.
            device: On NPU, the device whose family and count the param is checked against.
            capacity: For tensors of an NPU, of torch or MindSpore, whose counts lie on the device: how many elements
                this rank can receive. The param's four arrays are empty then, and a call takes the counts.

        Raises:
            InvalidParamError: a field has a value that ATB also refuses (docs/compatibility.md).
        """
        super().__init__(param, _core.AllToAllVParam, communicator, device)
        self._capacity, self._param = capacity, param
        if capacity is not None:
            param = _with_capacity(param, capacity)
        self._core = _core.AllToAllVOperation(param, device, self._given_core, self._connect)
        self._begin(self._core, "all_to_all_v", communicator)
        self._counted: Any = None  # the engine of calls with counts on the device
        self._starts: dict[float, partial[None]] = {}  # by timeout: alike for calls that are alike

    @property
    def param(self) -> _core.AllToAllVParam:
        """A copy of the param that the operation was made with; with a capacity its arrays are what is checked."""
        return self._core.param

    def infer_shape(self, x: object) -> tuple[int, ...]:
        """Returns the output's shape for `x`, after ATB's checks of it; the peers' call also raises their errors."""
        return tuple(self._checks.infer_shape([self._checked(describe, x)]).shape)

    @overload
    def __call__(self, x: A, *, out: A | None = None, timeout: float | None = None) -> A: ...
    @overload
    def __call__(self, x: Any, *, send_counts: Any, sdispls: Any = None, recv_counts: Any = None) -> Any: ...
    def __call__(
        self,
        x: Any,
        *,
        out: Any = None,
        timeout: float | None = None,
        send_counts: Any = None,
        sdispls: Any = None,
        recv_counts: Any = None,
    ) -> Any:
        """Exchanges `x`.

        Args:
            x: Any shape of 1 to 8 dimensions, taken flat; one of ATB's seven dtypes: float16, float32, int8,
                int16, int32, int64, bfloat16. Copied first if it is not contiguous.
            out: Shape ``[1, sum(recv_counts)]``, kind and dtype of `x`, contiguous and writable, apart from `x` in
                memory. Left out, one is allocated: in shared memory, or on the NPU where `x` is.
            timeout: Seconds to wait for the peers; left out, the communicator's own.
            send_counts, sdispls, recv_counts: With a capacity, instead of `out` and `timeout`: see
                `alltoallv.torch.all_to_all_v`. They may lie on the device, and the host does not read them.

        Returns:
            `out`, or the tensor allocated; with a capacity the `Received` of the front end, without gradient, whose
            output has the shape ``[1, capacity]``.

        Raises:
            InvalidTensorError, InvalidParamError: an argument of this rank, or of a peer, is wrong; ``code`` is ATB's.
            PeerMismatchError: two ranks disagree about the operator, dtype or counts.
            PeerLostError, CommTimeoutError: a rank died, left, or did not arrive.
            HcclError: on NPU, a call into HCCL failed.
        """
        counted = self._capacity is not None or send_counts is not None
        y: Any = None
        if not counted:
            adapter = adapters.by_class.get(type(x)) or self._adapter(x)
            y = adapter.call(self._run, x, out, timeout)
            if y is not None:
                return y
        adapter = self._adapter(x)
        if counted:
            return self._exchange_counted(adapter, x, (send_counts, sdispls, recv_counts), out, timeout)
        y = adapter.differentiated(self, x, out, None, timeout)
        return adapter.call(self._exchange, adapter, x, out, timeout) if y is None else y

    def _run(self, x: A, out: A | None, timeout: float | None) -> Any:
        """Runs on tensors for which the core is set up; returns None, with nothing done, for others."""
        return self._core.call(x, out, timeout)

    def _exchange(self, adapter: Adapter[A], x: A, out: A | None, timeout: float | None) -> A:
        self._find_engine(adapter, x)
        limit = self._checked(_core.read_timeout, timeout)
        x = self._checked(self._as_input, "x", x, adapter)
        if out is not None:
            self._checked(self._check_output, out, adapter)
        target = self._set_up(adapter, [x], out)

        if self._engine is not None:
            self._checked(_core.check_apart, adapter.region(target), adapter.region(x))
            param = self._core.param
            layout = param.send_counts, param.sdispls, param.recv_counts, param.rdispls
            adapter.exchange(self._engine, self._operator, target, x, layout)
            return target
        start = self._starts.get(limit) or self._starts.setdefault(limit, partial(_start, self._core, limit))
        if self._npu or adapter.queues() or adapter.watches():
            adapter.launch(x, target, start)
        else:
            start(adapter.region(x), adapter.region(target), 0)
        return target

    def _exchange_counted(self, adapter: Adapter[Any], x: Any, counts: tuple[Any, ...], out: Any, timeout: Any) -> Any:
        def check() -> int:
            if self._capacity is None or counts[0] is None:
                raise InvalidParamError("send_counts and capacity belong together, expected both or neither", id=1207)
            if out is not None or timeout is not None:
                raise InvalidParamError("capacity is given, expected a call without out and timeout", id=1208)
            check_on_npu("x", adapter.device(x))
            return self._capacity

        capacity = self._checked(check)
        x = self._checked(self._as_input, "x", x, adapter)
        self._planned(adapter, [x], None)
        if self._counted is None:
            self._counted = self._group or adapter.engine(x, self._communicator or Communicator(self._found))
        return adapter.exchange_counted(self._counted, x, counts, capacity)

    def _connect(self, param: _core.AllToAllVParam) -> _core.Communicator:
        self._found = super()._connect(param)
        return self._found

    def _check_create(self, device: DeviceInfo) -> None:
        _core.check_create(self.param, device)


def _with_capacity(param: AllToAllVParam, capacity: int) -> AllToAllVParam:
    """Returns a param for the core's checks of the tensors, where the counts lie on the device."""
    for name in COUNTS:
        if counts := getattr(param, name):
            raise InvalidParamError(f"{name} is {list(counts)}, expected none with a capacity", id=1209)
    _core.checked_least("capacity", capacity, 1)
    fields = {name: getattr(param, name) for name in FIELDS}
    nothing, others = (0,) * param.rank_size, (0,) * (param.rank_size - 1)
    fields |= {"send_counts": nothing, "sdispls": nothing}
    return AllToAllVParam(**fields | {"recv_counts": (capacity, *others), "rdispls": (0, *(capacity for _ in others))})


def _start(core: _core.AllToAllVOperation, limit: float, read: Region, written: Region, stream: int) -> None:
    core.execute([read], [written], limit, stream)


_OPERATOR = "quantized_all_reduce"


class QuantAllReduceOperation(Operation):
    """A quantized all-reduce as a plan, which is set up once per shape.

    With a shared scale, int8 to float16: ``(sum of x of all ranks + rank_size * offset) * scale``. The sum is exact,
    then one multiplication and one rounding to float16, half to even; values that do not fit become the largest one.
    With ``QuantType.DYNAMIC`` it does what `alltoallv.numpy.quantized_all_reduce` does without a scale.

    Takes NumPy arrays and tensors of torch, MindSpore and Paddle, and returns the same kind; every rank gets the
    same bits, on every device. A call on the CPU blocks until the output is complete. Calls are collective; when a
    rank's own checks fail, the call fails on every rank.

    With torch tensors on a GPU or an NPU the codes travel over NCCL, HCCL or gloo, as bytes of an all-to-all and an
    all-gather, and are summed on the device. A call is enqueued on torch's current stream; the host waits only to read
    ``scale`` and ``offset``, which the ranks compare. Without a communicator, tensors on a GPU go through the default
    group of torch.distributed. Results have gradients in MindSpore's PyNative mode alone, with DYNAMIC: of the
    sum, not quantized. In its graphs the results of the cell `alltoallv.mindspore.QuantAllReduceCell` have.
    """

    def __init__(
        self,
        param: QuantAllReduceParam,
        communicator: Communicator | Member | None = None,
        *,
        device: DeviceInfo | None = None,
    ) -> None:
        """Checks the param as ATB's CreateOperation does; the arguments are as for `AllToAllVOperation`.

        ``communicator`` may also be a result of `alltoallv.torch.from_group`, for torch tensors of its device.

        Raises:
            InvalidParamError: a field has a value that ATB also refuses.
        """
        super().__init__(param, QuantAllReduceParam, communicator, device)
        self._param = param
        self._core = _core.QuantAllReduceOperation(param.core(), device, self._given_core, self._connect)
        self._begin(self._core, _OPERATOR, communicator)
        self._member: Communicator | None = self._communicator

    @property
    def param(self) -> QuantAllReduceParam:
        """The param that the operation was made with."""
        return self._param

    def __call__(
        self,
        x: A,
        scale: A | None = None,
        offset: A | None = None,
        *,
        out: A | None = None,
        error_feedback: Feedback[Any] | None = None,
        timeout: float | None = None,
    ) -> A:
        """Reduces `x`.

        Args:
            x: int8, 1 to 8 dimensions, the last a multiple of 16; with DYNAMIC float32, float16 or bfloat16 of any
                1 to 8 dimensions.
            scale: float16, equal on all ranks: ``[1]``, with PER_CHANNEL ``[n]`` or ``[1, n]`` for the last axis.
                None with DYNAMIC, as the offset.
            offset: float16, ``[1]``, equal on all ranks.
            out: Has the param's output dtype and the shape of `x`; contiguous and writable; with DYNAMIC it may be `x`.
                Left out, one is allocated: in shared memory, or on the device of `x`.
            error_feedback: With DYNAMIC the front end's ``ErrorFeedback`` (for Paddle NumPy's), on all ranks or none.
            timeout: Seconds to wait for the peers; left out, and on GPU and NPU, the communicator's own.

        Raises:
            InvalidTensorError, InvalidParamError: an argument of this rank, or of a peer, is wrong; ``code`` is ATB's.
            PeerMismatchError: two ranks differ in operator, number of elements, scale, offset or mode.
            ValueOverflowError: with ``overflow="raise"``, on every rank.
            PeerLostError, CommTimeoutError: a rank died, left, or did not arrive.
            HcclError: on NPU, a call into HCCL failed.
        """
        adapter = self._adapter(x)
        tensors = {"x": x} | {name: a for name, a in (("scale", scale), ("offset", offset)) if a is not None}
        y: A | None = adapter.differentiated(self, x, out, error_feedback, timeout)
        return adapter.call(self._reduce, adapter, tensors, out, error_feedback, timeout) if y is None else y

    def _reduce(
        self, adapter: Adapter[A], tensors: dict[str, A], out: A | None, feedback: Feedback[Any] | None, timeout: Any
    ) -> A:
        x = tensors["x"]
        self._find_engine(adapter, x)
        limit = self._checked(_core.read_timeout, timeout)
        inputs: list[A] = [self._checked(self._as_input, name, a, adapter) for name, a in tensors.items()]
        states = [] if feedback is None else self._checked(self._states, feedback, inputs[0], adapter)
        if out is not None:
            self._checked(self._check_output, out, adapter)
        target = self._set_up(adapter, inputs, out, states)
        if (self._npu or adapter.queues()) and self._engine is None:
            self._engine = adapter.engine(x, self._member)
        run: Callable[[], None]
        if self._engine is None:
            places = [adapters.find("x", a).region(a) for a in (*inputs, target, *states)]
            run = partial(self._core.execute, places[: len(inputs)], places[len(inputs) :], limit)
        else:
            self._checked(adapter.check_place, self._engine, inputs[0], target, *states)
            request = self._checked(self._request, adapter, inputs, target)
            run = partial(adapter.reduce, self._engine, request, (target, inputs[0], *states))
        adapter.show(_OPERATOR, (target, *states), inputs, run)
        return target

    def _connect(self, param: _core.AllToAllVParam) -> _core.Communicator:
        core = super()._connect(param)
        if self._npu:
            self._member = Communicator(core)
        return core

    def _check_create(self, device: DeviceInfo) -> None:
        _core.QuantAllReduceOperation(self._param.core(), device)

    def _states(self, feedback: Feedback[Any], x: A, adapter: Adapter[A]) -> list[Any]:
        """Returns the arrays of the error feedback, which the call replaces."""
        param = self._param
        if param.quant_type != QuantType.DYNAMIC:
            raise InvalidParamError(
                "error_feedback is given with a shared scale, expected quant_type 16 (DYNAMIC)", id=1221
            )
        desc = describe(x)
        counts = (math.prod(desc.shape),)
        request = QuantizedReduction(_OPERATOR, desc.dtype, desc.dtype, counts, param.quantization)
        arrays = adapter.feedback.arrays_of(feedback, request, param.rank_size, param.rank, x)
        return [a for a in arrays if a is not None]

    def _request(self, adapter: Adapter[A], inputs: Sequence[A], out: A) -> QuantizedReduction:
        """Returns the request for an engine, from tensors that it reaches."""
        dtype, out_dtype = adapter.dtype(inputs[0]), adapter.dtype(out)
        target, source = adapter.region(out), adapter.region(inputs[0])
        if target[0] != source[0] or out_dtype != dtype:
            _core.check_apart(target, source)
        return self._terms(adapter, inputs, out_dtype)

    def request(self, *inputs: A) -> QuantizedReduction:
        """Returns what a call with tensors of these shapes and dtypes asks of an engine, after ATB's checks of them."""
        expected = self._checks.infer_shape([self._checked(describe, x) for x in inputs])
        return self._checked(self._terms, adapters.find("x", inputs[0]), inputs, expected.dtype)

    def _terms(self, adapter: Adapter[A], inputs: Sequence[A], out_dtype: str) -> QuantizedReduction:
        shape, dtype = tuple(describe(inputs[0]).shape), adapter.dtype(inputs[0])
        counts = (math.prod(shape),)
        if self._param.quant_type == QuantType.DYNAMIC:
            return QuantizedReduction(_OPERATOR, dtype, out_dtype, counts, self._param.quantization, shape=shape)
        scale, offset = (adapter.values(x).reshape(-1).astype(np.float32) for x in inputs[1:])
        terms = Quantization(), scale, None, float(offset[0]), shape
        return QuantizedReduction(_OPERATOR, dtype, out_dtype, counts, *terms)
