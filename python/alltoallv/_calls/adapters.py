"""An adapter reads and makes the tensors of one framework.

Each framework's front end has one, and `find` chooses it.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.guard import Handle
from alltoallv.errors import InvalidParamError, InvalidTensorError

A = TypeVar("A", bound=Any)  # the framework's tensor
T = TypeVar("T")

# The modules with the adapters. One is imported when such a tensor is met: no framework is imported before that.
_HOMES = {
    "numpy": "alltoallv.numpy.arrays",
    "torch": "alltoallv.torch.quantized.adapter",
    "mindspore": "alltoallv.mindspore.front_end",
    "paddle": "alltoallv.paddle.front_end",
}
by_class: dict[type, Adapter[Any]] = {}  # by class of tensors


def wrong_dtype(name: str, own: object, expected: object) -> InvalidTensorError:
    return InvalidTensorError(f"{name} has dtype {own}, expected {expected}", 13, id=2036)


def not_contiguous(name: str) -> InvalidTensorError:
    return InvalidTensorError(f"{name} is not contiguous, expected a contiguous tensor", id=2037)


def not_writable(name: str) -> InvalidTensorError:
    return InvalidTensorError(f"{name} is not contiguous and writable, expected both", id=2062)


def check_on_npu(name: str, device: str, shown: object = None) -> None:
    """Raises InvalidTensorError for a tensor of another device, whose name is ``shown``, in a call with a capacity."""
    if device != "npu":
        raise InvalidTensorError(f"{name} lies on {shown or device}, expected an npu with a capacity", 14, id=2060)


class Adapter(ABC, Generic[A]):
    """Shows one framework's tensors to the core; the base class holds what all tensors in host memory share."""

    kind: ClassVar[str]  # the framework's kind of tensor, for messages
    tensor: ClassVar[type[Any]]  # the class of its tensors
    feedback: ClassVar[type[Any]]  # the class of error feedback
    handle: ClassVar[type[Handle]]  # the handle of a call under way
    done: ClassVar[type[Any]]  # the handle of a call that has ended or that the framework orders; made from its output

    direct: ClassVar[bool] = False  # whether the core reads this framework's tensors in place at any time
    tracks_writes: ClassVar[bool] = False

    @abstractmethod
    def check(self, name: str, x: A) -> None:
        """Raises InvalidTensorError unless ``x`` is a dense block of memory."""

    def listed(self, name: str, tensors: Any) -> Sequence[A]:
        """Returns ``tensors`` if it is a list or tuple, else raises TypeError; its tensors are checked later."""
        if not isinstance(tensors, list | tuple):
            raise TypeError(f"{name} is a {type(tensors).__name__}, expected a list of tensors")
        return tensors

    @abstractmethod
    def contiguous(self, x: A) -> A:
        """Returns these values in contiguous memory, complete and without history; copies only if needed."""

    def strides(self, x: A) -> Sequence[int] | None:
        """Returns the strides, in elements; None where a call must read what `contiguous` returns."""
        return None

    def writable(self, x: A) -> bool:
        """Returns whether ``x`` itself is contiguous memory that may be written."""
        return bool(x.is_contiguous())

    def read(self, name: str, x: A, /) -> A:
        """Checks an input and returns it as `contiguous` does."""
        self.check(name, x)
        return self.contiguous(x)

    def exchange_counted(self, engine: Any, x: A, counts: Sequence[Any], capacity: int) -> Any:
        """Exchanges the elements of ``x`` by send counts, displacements and receive counts that lie on its device."""
        raise InvalidTensorError(
            f"x is {self.kind}, expected an npu tensor of torch or MindSpore with a capacity", 14, id=2035
        )

    @abstractmethod
    def name(self, dtype: Any, /) -> str:
        """Returns the core's name of one of the framework's dtypes."""

    def dtype(self, x: A) -> str:
        """Returns the core's name of the tensor's dtype."""
        return self.name(x.dtype)

    @abstractmethod
    def region(self, x: A, /) -> Region:
        """Returns the address and the number of bytes of a contiguous tensor."""

    def address(self, x: A, /) -> int:
        """Returns the address of the first element."""
        return self.region(x)[0]

    @abstractmethod
    def allocate(self, shape: Sequence[int], dtype: str, like: A) -> A:
        """Returns a new tensor of the core's ``dtype`` where ``like`` is, in shared memory if that is the host."""

    def new(self, shape: Sequence[int], like: A, *, zero: bool = False) -> A:
        """Returns a new tensor in host memory with the dtype of ``like``, filled with zeros if ``zero`` is true."""
        out = self.allocate(shape, self.dtype(like), like)
        if zero:
            as_bytes(self.region(out))[...] = 0
        return out

    def from_block(self, block: _core.Block, shape: Sequence[int], like: A) -> A:
        """Returns a tensor of that shape and the dtype of ``like`` over a block, which lives as long as it."""
        raise NotImplementedError

    def check_output(self, name: str, x: A, like: A | None = None) -> str:
        """Checks a tensor that will be written: it has the dtype of ``like``. Returns the core's name of the dtype."""
        self.check(name, x)
        dtype = self.dtype(x)
        if like is not None and dtype != self.dtype(like):
            raise wrong_dtype(name, dtype, self.dtype(like))
        if not self.writable(x):
            raise not_contiguous(name)
        return dtype

    def writes(self, x: A) -> None:
        """Prepares for a write to a caller's tensor; called before it if the adapter's ``tracks_writes`` is true."""

    def queues(self) -> bool:
        """Returns whether calls wait in the framework's queue instead of running when they are made."""
        return False

    def watches(self) -> bool:
        """Returns whether `launch` shows the framework each call, also in host memory."""
        return False

    def show(self, name: str, outputs: Sequence[Any], inputs: Sequence[Any], run: Callable[[], None]) -> None:
        """Runs a call of these tensors; a framework that somebody watches shows them."""
        run()

    def enqueue(self, linear: Any, input: A, output: A | None) -> A:
        """Puts an `alltoallv._calls.collectives.Linear` into the framework's queue and returns its output."""
        raise NotImplementedError

    def learn(self, transfer: Any, input: A) -> Sequence[int]:
        """Returns the receive counts, in elements, of an exchange that will run in the framework's queue."""
        raise NotImplementedError

    def key(self, x: A) -> tuple[Hashable, ...]:
        """Returns what the set-up of a call depends on, the shape first."""
        return tuple(x.shape), x.dtype

    def device(self, x: A) -> str:
        """Returns the kind of the tensor's device: ``"cpu"``, ``"npu"`` or ``"cuda"``."""
        return "cpu"

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Calls ``function`` outside of the graph that the framework may be making."""
        return function(*args)

    def differentiated(self, operation: Any, x: A, out: A | None, feedback: Any, timeout: float | None) -> A | None:
        """Runs an operation of ATB in the framework's autograd; None where `x` wants no gradient."""
        return None

    def launch(self, x: A, out: A, start: Callable[[Region, Region, int], None]) -> None:
        """Calls ``start`` with the memory of both tensors and the current stream of their device."""
        raise NotImplementedError

    def engine(self, x: A, member: Any) -> Any:
        """Returns what reduces on the device of ``x``: an engine, or None where the framework's group does it."""
        raise NotImplementedError

    def check_place(self, engine: Any, *tensors: A) -> None:
        """Raises InvalidTensorError for tensors that the engine does not reach."""
        raise InvalidTensorError(
            f"x is {self.kind}, expected a tensor in memory that domain '{engine.domain}' can access", 14, id=2038
        )

    def exchange(self, engine: Any, operator: str, out: A, x: A, layout: Any) -> None:
        """Runs an exchange of contiguous tensors there; the layout is in elements."""
        raise NotImplementedError

    def reduce(self, engine: Any, request: Any, tensors: Sequence[A]) -> None:
        """Runs a quantized reduction there. ``tensors`` are the output, the input and the states of error feedback."""
        raise NotImplementedError

    def values(self, x: A) -> Any:
        """Returns the values as a NumPy array, of float32 where NumPy lacks the dtype."""
        raise NotImplementedError


def find(name: str, x: object) -> Adapter[Any]:
    """Returns the adapter of the framework that ``x`` belongs to; raises InvalidTensorError if that is none."""
    kind = type(x)
    if kind not in by_class:
        roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
        home = next((_HOMES[root] for root in roots if root in _HOMES), None)
        adapter = None if home is None else import_module(home).ADAPTER
        if adapter is None or not isinstance(x, adapter.tensor):
            raise InvalidTensorError(
                f"{name} is a {kind.__name__}, expected a NumPy array or a tensor of torch, MindSpore or Paddle",
                5,
                id=2039,
            )
        by_class[kind] = adapter
    return by_class[kind]


# Regions of host memory: which of them overlap, and where they lie from a common base.


Region = tuple[int, int]  # address of the first byte, number of bytes


def check_untracked(tracked: bool, value: Any, name: str = "input", argument: str = "out") -> None:
    """Raises InvalidParamError for an argument that nobody may give for an input of which autograd keeps track."""
    if tracked and value is not None:
        raise InvalidParamError(
            f"{argument} is given for {name}, which wants a gradient, expected one or the other", id=1151
        )


def lowest(regions: Sequence[Region]) -> tuple[int, list[int]]:
    """Returns the lowest address of any byte, and each region's offset from there in bytes; 0 for empty ones."""
    base = min([address for address, nbytes in regions if nbytes], default=0)
    return base, [address - base if nbytes else 0 for address, nbytes in regions]


def as_bytes(region: Region) -> npt.NDArray[Any]:
    """Returns the region as an array over its memory, which the caller keeps alive."""
    address, nbytes = region
    if not nbytes:
        return np.empty(0, np.uint8)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8)
