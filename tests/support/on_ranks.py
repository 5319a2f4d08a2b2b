"""Tests that are what every rank does: ``@on_ranks(2)`` before a function of the rank's communicator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

Function = Callable[..., Any]


def mostly_slow(values: Iterable[Any], but: Collection[Any]) -> list[Any]:
    """Parameters of a test, of which all but these are slow."""
    return [pytest.param(value, marks=() if value in but else pytest.mark.slow) for value in values]


def on_ranks(size: int | None = None, **options: Any) -> Callable[[Function], Function]:
    """The test runs on ranks that the fixture `ranks` makes with these options.

    Its function is called with the communicator, or with ``communicator=False`` with rank and size, and then with its
    own fixtures and parameters. Where ``size`` is left out it is a parameter of the test.
    """
    given = 1 if options.get("communicator", True) else 2
    return called_by("ranks", given, size, lambda ranks, size: ranks(size, **options))


def on_both(size: int, **options: Any) -> Callable[[Function], Function]:
    """The same on ranks that are processes, and on ranks that are threads."""

    def call(launch: Function, size: int) -> Function:
        return lambda function, *arguments: launch(size, function, *arguments, **options)

    return called_by("launch", 1, size, call)


def called_by(
    fixture: str, given: int, size: int | None, make: Callable[[Any, int], Function]
) -> Callable[[Function], Function]:
    """Tests whose function is called by what ``make`` returns of the fixture's value; ``given``: its arguments."""

    def decorate(function: Function) -> Function:
        own = list(inspect.signature(function).parameters)[given:]
        names = dict.fromkeys([fixture, *([] if size else ["size"]), *own])

        @functools.wraps(function)
        def test(**values: Any) -> None:
            make(values[fixture], size or values["size"])(function, *(values[name] for name in own))

        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate
