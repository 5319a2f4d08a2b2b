"""A front end of host memory defines these methods; its collectives, objects and messages start here."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from alltoallv import _absent, _core
from alltoallv._calls import messages
from alltoallv._calls.adapters import A, Adapter
from alltoallv._calls.collectives import leaf_products, leaf_reduction
from alltoallv._calls.counts import Counts, Unit
from alltoallv._calls.guard import Handle, guard
from alltoallv._calls.messages import COLLECTIVES
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError

G = TypeVar("G")  # its groups
H = TypeVar("H", bound=Handle)  # its handles


class FrontEnd(ABC, Generic[A, G, H]):
    """Knows the groups, tensors and handles of one framework."""

    adapter: ClassVar[Adapter[Any]]
    messenger: ClassVar[Adapter[Any] | None] = None  # for messages, which use tensors at once; None: the adapter
    local: ClassVar[type[Exception] | tuple[()]] = ()  # errors that concern a rank alone; see `guard`

    @abstractmethod
    def enter(self, group: G) -> Communicator | None:
        """Returns the group's communicator, or None on a rank outside of it."""

    def host(self, comm: Communicator) -> Communicator:
        """Returns the communicator of these ranks in host memory, over which counts, objects and messages travel."""
        return comm

    def rank_in(self, group: G, rank: Any, name: str) -> Any:
        """Returns the group's number of ``rank``, which the caller gave as the argument ``name``."""
        return rank

    def checked_rank(self, comm: Communicator, group: G, name: str, rank: Any) -> Any:
        """Returns `rank_in`; raises if there is no such rank."""
        return _core.checked_rank(name, self.rank_in(group, rank, name), comm.size)

    def reduction(self, op: Any) -> str:
        """Returns the core's name of a reduction."""
        name: str = op
        return name

    def ended(self, result: Any) -> H | None:
        """Returns what a synchronous call returns once it is done."""
        return None

    def check_async(self, async_op: Any) -> None:
        """Raises if ``async_op`` is no bool, where the framework does so."""

    def call(
        self,
        operator: str,
        group: G,
        async_op: bool,
        outputs: Any = None,
        inputs: Any = None,
        names: tuple[str, str, str] = ("tensor", "tensor", ""),
        *,
        root: tuple[str, Any] | None = None,
        timeout: float | None = None,
        gradient: Any = None,
        **terms: Any,
    ) -> H | None:
        """Runs a collective on tensors, or lists of them, or submits it for the handle.

        Args:
            names: Of the arguments that give the outputs, the inputs and the counts.
            root: The name and the value of the argument that gives the root.
            gradient: Passed to `prepare`.
            terms: As `_core.CheckedCall` takes them; ``reduce_op`` is the framework's name or object.
        """
        comm = self.enter(group)
        if comm is None:
            return None
        with guard(comm, operator, self.local):
            self.check_async(async_op)
            limit = _core.read_timeout(timeout)
            if root is not None:
                terms["root"] = self.checked_rank(comm, group, *root)
            if "reduce_op" in terms:
                terms["reduce_op"] = self.reduction(terms["reduce_op"])
            call = self.prepare(comm, operator, outputs, inputs, {"names": names, **terms}, gradient)
        return self.start(comm, call, async_op, limit)

    def prepare(
        self, comm: Communicator, operator: str, outputs: Any, inputs: Any, terms: dict[str, Any], gradient: Any
    ) -> Any:
        """Checks the arguments; returns what `start` takes. ``gradient`` describes how outputs get one, if they can."""
        call = _core.CheckedCall(self.adapter, comm.core, operator, outputs, inputs, **terms)
        if self.adapter.tracks_writes:
            for output in call.outputs:
                self.adapter.writes(output)
        return call

    def start(self, comm: Communicator, call: Any, async_op: bool, timeout: float) -> H | None:
        """Runs the call, or submits it and returns the handle."""
        if not async_op:
            call.run(timeout)
            return self.ended(call.result)
        return cast("H", self.adapter.handle(comm, call.submit(timeout), (call,), lambda: call.result))

    def all_reduce_leaves(self, tensor: A, leaves: int, group: G, apply: Callable[[A, Any], A]) -> A | None:
        """Returns the sum of all ranks' leaves; ``apply`` runs a map in autograd. None on a rank outside the group."""
        comm = self.enter(group)
        if comm is None:
            return None
        with guard(comm, "all_reduce", self.local):
            self.adapter.check("tensor", tensor)
            shape: tuple[int, ...] = tuple(cast("Any", tensor).shape)
            reduction = leaf_reduction(self.adapter, comm, shape, leaves)
            _core.check_reduction("sum", self.adapter.dtype(tensor))
        return apply(tensor, reduction)

    def row_parallel_linear(
        self,
        tensors: tuple[A, A, A | None],
        leaves: int,
        group: G,
        apply: Callable[[A, Any], A],
        multiply: Callable[[A, A], A],
        stack: Callable[[list[A]], A],
    ) -> A | None:
        """Runs a linear layer of input, weight and bias; for ``multiply`` see `leaf_products`."""
        comm = self.enter(group)
        if comm is None:
            return None
        with guard(comm, "all_reduce", self.local):
            for name, x in zip(("input", "weight", "bias"), tensors, strict=True):
                if x is not None:
                    self.adapter.check(name, x)
            products = stack(leaf_products(*tensors, leaves, comm.size, multiply))
        total: Any = self.all_reduce_leaves(products, leaves, group, apply)
        result: A = total if tensors[2] is None else total + tensors[2]
        return result

    def objects(
        self,
        operator: str,
        group: G,
        value: Any,
        *,
        root: tuple[str, Any] | None = None,
        check: Callable[[int, bool], None] | None = None,
        timeout: float | None = None,
        **more: Any,
    ) -> Any:
        """Runs one of `alltoallv._calls.messages.COLLECTIVES`; returns its result, None on a rank outside the group.

        Args:
            root: The name and the value of the argument that gives the root.
            check: Refuses other arguments; gets the number of ranks, and whether this one is the root.
        """
        comm = self.enter(group)
        if comm is None:
            return None
        comm = self.host(comm)
        with guard(comm, operator, self.local):
            limit = _core.read_timeout(timeout)
            if root is not None:
                more["root"] = self.checked_rank(comm, group, *root)
            if check is not None:
                check(comm.size, more.get("root") == comm.rank)
            run = COLLECTIVES[operator](comm, value, **more)
        return run(limit)

    def message(
        self,
        operator: str,
        group: G,
        tensor: A,
        peer: tuple[str, Any],
        *,
        waits: bool,
        tag: int = 0,
        to_itself: bool = True,
    ) -> Callable[[], H | None]:
        """Checks the ``"send"`` or ``"recv"`` of a tensor; returns what runs it, or, if it does not wait, submits it.

        That returns the handle.

        Args:
            peer: The name and the value of the argument that gives the other rank.
            to_itself: False if the framework refuses messages from a rank to itself.
        """
        comm = self.enter(group)
        if comm is None:
            return lambda: None
        rank = self.checked_rank(comm, group, *peer)  # None, any rank, is none that these front ends have
        if not to_itself and rank == comm.rank:
            raise InvalidParamError(f"{peer[0]} is {rank}, this rank itself, expected another one", id=1135)
        message, used = messages.message(self.messenger or self.adapter, comm, operator, tensor, rank, tag, waits=waits)

        def start() -> H | None:
            if operator == "recv" and self.adapter.tracks_writes:
                self.adapter.writes(tensor)
            if waits:
                message.run()
                return self.ended(tensor)
            return cast("H", self.adapter.handle(comm, message.submit(), (used,), lambda: tensor))

        return start


# How the functions of all front ends look from outside, and how they take the places of a framework's own.


if TYPE_CHECKING:
    from typing_extensions import TypedDict

    class ExchangeOptions(TypedDict, Generic[A, G], total=False):
        """The keyword arguments of `all_to_all_v` except ``async_op``, which decides the type of the result."""

        sdispls: Counts | None
        rdispls: Counts | None
        unit: Unit | None
        out: A | None
        group: G
        timeout: float | None


def publish(package: dict[str, Any]) -> None:
    """Gives the functions that a package offers its name as their module; ``package`` is its ``globals()``.

    dir() and with it tab completion then show what ``__all__`` has, and not the modules inside the package.
    """

    def absent(name: str) -> Any:
        raise _absent(package["__name__"], name)

    package["__getattr__"] = absent
    package["__dir__"] = lambda: [*package["__all__"], *(name for name in package if name.startswith("__"))]
    for name in package["__all__"]:
        function = package[name]
        if isinstance(function, FunctionType):
            function.__module__, function.__qualname__ = package["__name__"], name


class Replacements:
    """What has been replaced in a package, in order.

    Args:
        package: The framework's name.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._replaced: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def replace(self, owner: Any, name: str, ours: Any) -> None:
        """Replaces an attribute of a module or a class."""
        self._replaced.append((owner, name, vars(owner)[name] if name in vars(owner) else getattr(owner, name)))
        setattr(owner, name, ours)

    def everywhere(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Replaces objects, given with ours, in all modules of the package that are imported."""
        ours = {id(theirs): each for theirs, each in pairs}
        for module in [each for name, each in sys.modules.items() if name.partition(".")[0] == self._package]:
            for name, value in list(vars(module).items()):
                if id(value) in ours:
                    self.replace(module, name, ours[id(value)])

    def undo(self) -> None:
        """Puts all back; does nothing if nothing is replaced."""
        while self._replaced:
            owner, name, theirs = self._replaced.pop()
            setattr(owner, name, theirs)
