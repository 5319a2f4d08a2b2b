"""The common part of ATB's operators: tensors of any framework, and failures that are announced to the peers."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from alltoallv import _core
from alltoallv._calls import adapters
from alltoallv._calls.adapters import Adapter
from alltoallv._calls.guard import guard
from alltoallv._calls.protocol import Member
from alltoallv.atb.member import connect
from alltoallv.communicator import Communicator
from alltoallv.errors import AllToAllVError, InvalidParamError, InvalidTensorError

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")  # a NumPy array, or a tensor of torch, MindSpore or Paddle


class Checks(Protocol):
    """The checks of one rank of several: the peers also raise a failure."""

    def infer_shape(self, inputs: Sequence[_core.TensorDesc]) -> _core.TensorDesc: ...
    def setup(self, inputs: Sequence[_core.TensorDesc], outputs: Sequence[_core.TensorDesc]) -> None: ...
    def announce(self, code: int, message: str) -> None: ...


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
            code = 27 if isinstance(error, MemoryError) else getattr(error, "code", 3)
            self._checks.announce(code, str(error))
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
            if (rank, rank_size) != (group.rank, group.size):
                raise InvalidParamError(
                    f"rank and rank_size are {rank} and {rank_size}, expected {group.rank} and "
                    f'{group.size}, as in the communicator "{group.domain}"',
                    id=1018,
                )

    def announce(self, code: int, message: str) -> None:
        with contextlib.suppress(AllToAllVError):  # nobody is left to inform: the first error counts
            self._group.fail(self._operator, InvalidTensorError(message, code))


def describe(x: Any) -> _core.TensorDesc:
    """Returns shape and dtype, as the core takes them."""
    return _core.TensorDesc(x.shape, adapters.find("x", x).dtype(x))
