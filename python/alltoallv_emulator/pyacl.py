"""Makes functions of the emulator's C library functions of pyACL, for the modules in startup/acl."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from alltoallv_emulator import library_folder

__all__ = ["Result", "function", "library", "missing"]


class Result(NamedTuple):
    """A parameter through which the function gives a result of this type."""

    type: Any


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the emulator's libascendcl.so."""
    return ctypes.CDLL(str(library_folder() / "libascendcl.so"))


def function(symbol: str, *parameters: Any) -> Callable[..., Any]:
    """Returns a function that takes what is no `Result`, and returns the results and ACL's code, or the code alone."""
    input_count = sum(not isinstance(parameter, Result) for parameter in parameters)

    def call(*arguments: Any) -> Any:
        if len(arguments) != input_count:
            raise TypeError(f"{symbol} of pyACL takes {input_count} arguments, and {len(arguments)} are given")
        values, results, passed = iter(arguments), [], []
        for parameter in parameters:
            if isinstance(parameter, Result):
                results.append(parameter.type())
                passed.append(ctypes.byref(results[-1]))
            else:
                passed.append(parameter(next(values)))
        code = getattr(library(), symbol)(*passed)
        return (*(result.value or 0 for result in results), code) if results else code

    call.__name__ = call.__qualname__ = symbol
    call.__doc__ = f"Calls {symbol}."
    return call


def missing(module: str) -> Callable[[str], Any]:
    """Returns a module's ``__getattr__``, which says that the emulator has no such function of pyACL."""

    def refuse(name: str) -> Any:
        raise AttributeError(f"{module}.{name} is not among what the emulator has of pyACL: see docs/emulator.md")

    return refuse
