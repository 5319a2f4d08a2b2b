"""How the functions of the front ends look from outside."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from alltoallv import _absent
from alltoallv._calls.counts import Counts, Unit

A = TypeVar("A")  # the framework's tensor
G = TypeVar("G")  # its groups

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
