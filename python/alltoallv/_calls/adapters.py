"""What takes tensors of any framework knows them by an adapter, which the framework's front end has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar

from alltoallv import _core
from alltoallv._calls.handle import Handle
from alltoallv._calls.regions import Region, as_bytes
from alltoallv.errors import InvalidTensorError

A = TypeVar("A")  # the framework's tensor
T = TypeVar("T")

# Where the front ends have theirs; imported when such a tensor is met, since no framework is imported before.
_HOMES = {
    "numpy": "alltoallv.numpy.adapter",
    "torch": "alltoallv.torch.quantized.adapter",
    "mindspore": "alltoallv.mindspore.adapter",
    "paddle": "alltoallv.paddle.adapter",
}
_found: dict[type, Adapter[Any]] = {}


class Adapter(ABC, Generic[A]):
    """One framework's tensors as the core sees them. Here is what holds for those that only lie in host memory."""

    kind: ClassVar[str]  # for messages
    tensor: ClassVar[type[Any]]  # the class of its tensors
    feedback: ClassVar[type[Any]]  # the class of error feedback
    handle: ClassVar[type[Handle]]  # of a call under way
    done: ClassVar[type[Any]]  # of one that has ended, or that the framework orders; made of its output

    hears: ClassVar[bool] = False

    @abstractmethod
    def check(self, name: str, x: A) -> None:
        """Refuses what is no dense block of memory."""

    def listed(self, name: str, tensors: Any) -> Sequence[A]:
        """A list of tensors, which are not looked at yet."""
        if not isinstance(tensors, list | tuple):
            raise TypeError(f"{name} is a {type(tensors).__name__}, expected a list of tensors")
        return tensors

    @abstractmethod
    def contiguous(self, x: A) -> A:
        """A tensor of these values in contiguous memory, complete, without history; copied only if it must be."""

    @abstractmethod
    def writable(self, x: A) -> bool:
        """Whether ``x`` itself is contiguous memory that may be written."""

    def read(self, name: str, x: A, /) -> A:
        """An input as `contiguous` has it, checked."""
        self.check(name, x)
        return self.contiguous(x)

    @abstractmethod
    def name(self, dtype: Any, /) -> str:
        """The core's name of one of the framework's dtypes."""

    def dtype(self, x: A) -> str:
        """The core's name of a tensor's dtype."""
        return self.name(x.dtype)  # type: ignore[attr-defined]

    @abstractmethod
    def region(self, x: A, /) -> Region:
        """Where a contiguous tensor lies."""

    def address(self, x: A, /) -> int:
        """Where its first element lies."""
        return self.region(x)[0]

    @abstractmethod
    def allocate(self, shape: Sequence[int], dtype: str, like: A) -> A:
        """A new tensor where ``like`` is, in shared memory if that is the host; ``dtype`` is the core's name."""

    def new(self, shape: Sequence[int], like: A, *, zero: bool = False) -> A:
        """A new tensor in host memory, of the dtype of ``like``; zero everywhere if asked."""
        out = self.allocate(shape, self.dtype(like), like)
        if zero:
            as_bytes(self.region(out))[...] = 0
        return out

    def from_block(self, block: _core.Block, shape: Sequence[int], like: A) -> A:
        """The tensor of that shape over a block, which lives as long as the tensor; of the dtype of ``like``."""
        raise NotImplementedError

    def check_output(self, name: str, x: A, like: A | None = None) -> str:
        """Checks a tensor that is written, of the dtype of ``like``; the core's name of its dtype."""
        self.check(name, x)
        dtype = self.dtype(x)
        if like is not None and dtype != self.dtype(like):
            raise InvalidTensorError(f"{name} has dtype {dtype}, expected {self.dtype(like)}", 13)
        if not self.writable(x):
            raise InvalidTensorError(f"{name} is not contiguous, expected a contiguous tensor")
        return dtype

    def writes(self, x: A) -> None:
        """Told before a tensor of the caller is written, if it ``hears`` of that."""

    def queues(self) -> bool:
        """Whether calls wait in the framework's queue, instead of running when they are made."""
        return False

    def enqueue(self, linear: Any, input: A, output: A | None) -> A:
        """Runs an `alltoallv._calls.linear.Linear` there."""
        raise NotImplementedError

    def learn(self, transfer: Any, input: A) -> Sequence[int]:
        """The receive counts of an exchange that is to run there, in elements."""
        raise NotImplementedError

    def key(self, x: A) -> tuple[Hashable, ...]:
        """What set-up depends on, the shape first."""
        return tuple(x.shape), x.dtype  # type: ignore[attr-defined]

    def device(self, x: A) -> str:
        """The kind of its device: ``"cpu"``, ``"npu"``, ``"cuda"``."""
        return "cpu"

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Calls ``function``, outside of the graph that the framework may be making."""
        return function(*args)

    def launch(self, x: A, start: Callable[[int], None]) -> None:
        """Calls ``start`` with the current stream of the device of ``x``."""
        raise NotImplementedError

    def engine(self, x: A, member: Any) -> Any:
        """What reduces on the device of ``x``: over a communicator of devices, or None: the framework's group."""
        raise NotImplementedError

    def check_place(self, engine: Any, *tensors: A) -> None:
        """Refuses tensors that the engine does not reach."""
        raise InvalidTensorError(f"x is {self.kind}, expected a tensor that domain '{engine.domain}' reaches", 14)

    def reduce(self, engine: Any, request: Any, tensors: Sequence[A]) -> None:
        """Runs a quantized reduction there. ``tensors``: the output, the input, the states of error feedback."""
        raise NotImplementedError

    def values(self, x: A) -> Any:
        """A tensor's values as an array of NumPy, of float32 where NumPy lacks the dtype."""
        raise NotImplementedError


def find(name: str, x: object) -> Adapter[Any]:
    """The adapter of the framework that ``x`` belongs to.

    Raises:
        InvalidTensorError: it belongs to none; ``code`` is 5.
    """
    kind = type(x)
    if kind not in _found:
        roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
        home = next((_HOMES[root] for root in roots if root in _HOMES), None)
        adapter = None if home is None else import_module(home).ADAPTER
        if adapter is None or not isinstance(x, adapter.tensor):
            raise InvalidTensorError(
                f"{name} is a {kind.__name__}, expected a NumPy array or a tensor of torch, MindSpore or Paddle", 5
            )
        _found[kind] = adapter
    return _found[kind]
